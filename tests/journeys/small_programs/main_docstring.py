"""What this program does."""
print(__doc__)
import __main__

print(__main__.__doc__, vars(__main__) is globals())
for i in range(2):
    x: int = i
print(__annotations__)
