match command:
    case {"lr": lr}:
        if (speed := float(lr)) > 0:
            set_speed(speed)
            apply()
    case _:
        pass
