"""The tensors of a serving case: queries, stores of keys and values, page tables."""

import torch

from .contenders import DTYPES
from .serving_cases import PACKED, SLOTS

E4M3 = torch.float8_e4m3fn


def sums(lengths):
    """First rows of each, and the end of the last one."""
    total, found = 0, [0]
    for n in lengths:
        total += n
        found.append(total)
    return found


class Data:
    """Tensors of one case on one device. Launch `i` of a graph takes the keys and values of `store(i)` by
    `table(i)`."""

    def __init__(self, case, device):
        self.case, self.device = case, device
        self.nodes, self.stores = case.nodes()
        self.dtype = DTYPES[case.dtype]
        self.element = E4M3 if case.is_quantised else self.dtype
        self.q = self.random(case.total_rows, case.heads, case.head_dim).to(self.dtype)
        self.sinks = self.random(case.heads).to(self.dtype) if case.sinks else None
        # Scales that differ between heads, as those of a calibrated cache do.
        heads = torch.arange(case.kv_heads, device=device, dtype=torch.float32)
        self.k_scale, self.v_scale = (0.5 + heads / case.kv_heads, 1.25 - heads / (2 * case.kv_heads))
        self.lengths = self.ints(case.lengths)
        self.first_rows, self.first_keys = self.ints(sums(case.rows)), self.ints(sums(case.lengths))
        if case.is_paged:
            self.pages_of = [-(-n // case.store) for n in case.lengths]
            self.pages = sum(self.pages_of)
            self.order = torch.randperm(self.pages, device=device).int()
            # Where a store is read as a whole, another order of its pages is no other memory.
            turns = 1 if case.window is None else -(-self.nodes // self.stores)
            self.tables = [self.table_of(turn) for turn in range(turns)]
        self.kv = [(self.random_store(), self.random_store()) for _ in range(self.stores)]
        self.copies = {}

    def random(self, *shape):
        return torch.randn(*shape, device=self.device, dtype=torch.float32)

    def ints(self, numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def random_store(self):
        case = self.case
        first = {PACKED: (sum(case.lengths),), SLOTS: (case.batch, max(case.lengths))}
        shape = first[case.store] if not case.is_paged else (self.pages, case.store)
        # A part at a time: the whole in float32 would be four times the memory.
        out = torch.empty(*shape, case.kv_heads, case.head_dim, dtype=self.element, device=self.device)
        for part in out.flatten(0, -3).split(1 << 16):
            part.copy_(self.random(*part.shape))
        return out

    def table_of(self, turn):
        """The page table of the launches that take a store for the `turn`th time: each sequence's pages move on by
        as many as are read, so that none is read twice."""
        page, seen = self.case.store, map(self.case.seen, range(self.case.batch))
        read = max(end // page - first // page + 1 for first, end in seen)
        table = torch.zeros(self.case.batch, max(self.pages_of), dtype=torch.int32, device=self.device)
        at = turn * read
        for b, n in enumerate(self.pages_of):
            places = torch.arange(at, at + n, device=self.device) % self.pages
            table[b, :n] = self.order[places]
            at += n
        return table

    def store(self, node):
        return self.kv[node % self.stores]

    def table(self, node):
        return self.tables[node // self.stores % len(self.tables)]

    def wide_table(self, node, tokens):
        """The same in a table for sequences of so many tokens."""
        table = self.table(node)
        width = max(table.shape[1], -(-tokens // self.case.store))
        wide = torch.zeros(self.case.batch, width, dtype=torch.int32, device=self.device)
        wide[:, : table.shape[1]] = table
        return wide

    def sequence(self, node, b):
        """K and V of one sequence as they are kept, [keys, kv_heads, head_dim]."""
        case, n = self.case, self.case.lengths[b]
        if case.is_paged:
            # Bytes are what every build of PyTorch can gather.
            ids = self.table(node)[b, : self.pages_of[b]].long()
            gather = lambda t: t.view(torch.uint8)[ids].view(t.dtype).flatten(0, 1)[:n]
            return tuple(gather(t) for t in self.store(node))
        if case.store == SLOTS:
            return tuple(t[b, :n] for t in self.store(node))
        at = sum(case.lengths[:b])
        return tuple(t[at : at + n] for t in self.store(node))

    def values(self, node, b, dtype):
        """K and V of one sequence as the numbers that they stand for."""
        pair = (t.to(dtype) for t in self.sequence(node, b))
        if not self.case.is_quantised:
            return tuple(pair)
        return tuple(t * s.to(dtype)[:, None] for t, s in zip(pair, (self.k_scale, self.v_scale)))

    def is_copied(self):
        """Whether keys without pages are one copy for each store: not where launches read other parts of one."""
        return not self.case.is_paged or len(self.tables) == 1

    def packed(self, node):
        """K and V of all sequences one after the other, for those who know no pages."""
        if self.case.store == PACKED:
            return self.store(node)
        at = node % self.stores
        if at not in self.copies:
            pairs = [self.sequence(node, b) for b in range(self.case.batch)]
            self.copies[at] = tuple(torch.cat(parts) for parts in zip(*pairs))
        return self.copies[at]
