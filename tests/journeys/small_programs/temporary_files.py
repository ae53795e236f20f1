import os
import tempfile

for i in range(2):
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
        print(os.path.exists(file.name), len(os.path.basename(file.name)))
    with tempfile.TemporaryDirectory() as folder:
        open(os.path.join(folder, "a"), "w").close()
    print(os.path.exists(folder))
print(tempfile.mkdtemp() != tempfile.mkdtemp())
