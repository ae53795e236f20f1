// Sets the theme before anything is painted, so that nothing flashes.
(function () {
  let chosen = null;
  try { chosen = localStorage.getItem("rearview.theme"); } catch { /* a file or a private window */ }
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
