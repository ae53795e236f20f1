import copy


class Node:
    def __init__(self, next=None):
        self.next = next


node = None
for i in range(5):
    node = Node(node)
other = copy.deepcopy(node)
count = 0
while other is not None:
    count += 1
    other = other.next
print(count)
