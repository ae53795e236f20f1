match command:
    case {"lr": lr}:
        if (speed := float(lr)) > 0:
            set_speed(speed)
            print(f"{speed=:.2e}")
            apply()
    case _:
        pass
