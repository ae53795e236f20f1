// Sets the light or dark theme before the page is first painted, so that it does not flash in the other theme.
(function () {
  let chosen = null;
  try { chosen = localStorage.getItem("rearview.theme"); } catch { /* a file or a private window */ }
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
