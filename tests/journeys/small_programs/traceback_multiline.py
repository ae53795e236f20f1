def f(*args):
    for i in (
        1,
        2,
        0,
    ):
        result = (
            args[0]
            / i
            + args[1]
        )
    return result


f(
    1,
    2,
)
