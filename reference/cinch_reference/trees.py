"""The two trees: section "Tree"."""


def node(tree: int, m: int, label: int) -> int:
    """Returns the node of a label; m is the number of labels without the root."""
    if tree == 0 or label == 0:
        return label
    if m % 2 == 0:
        return m + 1 - label
    return m if label == 1 else label - 1


def children_of_node(m: int, v: int) -> list[int]:
    """Returns the nodes below node v, left before right."""
    if v == 0:
        return [1 << (m.bit_length() - 1)] if m else []
    h = (v & -v) // 2
    found = [v - h] if h else []
    right = h
    while right and v + right > m:
        right //= 2
    return found + ([v + right] if right else [])


def children(tree: int, n: int, label: int) -> list[int]:
    """Returns the labels below a label in a tree of n labels."""
    m = n - 1
    label_of = {node(tree, m, other): other for other in range(n)}
    return [label_of[v] for v in children_of_node(m, node(tree, m, label))]
