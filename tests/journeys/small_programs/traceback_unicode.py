def größe(名前):
    for буква in 名前:
        assert буква != "ö", f"unglücklich: {буква}"


größe("schön")
