match command:
    case {"lr": lr}:
        if (rate := float(lr)) > 0:
            set_rate(rate)
            print(f"{rate=:.2e}")
            apply()
    case _:
        pass
