def f():
    for i in range(3):
        try:
            {}[i]
        except KeyError as exc:
            exc.add_note(f"note {i}")
            exc.add_note("more\nlines")
            raise


f()
