"""The arguments of one call of gpt_attention for a configuration: random sizes and data, and poison elsewhere.

Sizes differ from call to call; attributes, dtypes, ranks and the set of arguments follow from the configuration.
"""

from __future__ import annotations

import numpy as np

from tests.serving.gpt_attention.gpt_attention_reference import Attention, Request, uncertain_keys
from tests.serving.gpt_attention.gpt_cache_reference import E4M3, FP8_MODE, INT8_MODE, Cache, Call, find_slot
from tests.serving.gpt_attention.gpt_case_features import Features
from tests.serving.gpt_attention.gpt_row_drawing import Arguments, RowDrawing, make_poison, surround_with_nan

CACHES: dict[str, np.dtype] = {"int8": np.dtype(np.int8), "fp8": E4M3}

TokenIndex = tuple[int, int, int]  # request, beam, token
Entry = tuple[int, int, int]  # request, beam, column of kv_cache_block_offsets


class Drawing(RowDrawing):
    """A call with its caches: numbers in the slots that it reads, poison elsewhere."""

    def __init__(self, case: Features, rng: np.random.Generator) -> None:
        super().__init__(case, rng)
        self.read: set[TokenIndex] = set()
        self.written: set[TokenIndex] = set()
        self.blocks_read: set[Entry] = set()
        self.blocks_written: set[Entry] = set()
        self.layer = self.pool_number = 0  # the layer's index in its pool, and the pool's number
        self.add_rows()
        self.add_lengths()
        self.add_indirection()
        self.add_mask()
        self.add_slopes()
        self.add_tables()
        self.add_caches()
        self.redraw_uncertain_keys()
        if case.fp8_output:
            self.arguments["attention_output_orig_quant_scale"] = surround_with_nan([float(rng.uniform(100, 400))])

    def pool(self) -> np.ndarray:
        """Return the pool of the layer."""
        if "past_key_value" in self.arguments:
            return self.arguments["past_key_value"]
        return self.arguments["host_kv_cache_pool_pointers"][self.pool_number]

    def offsets(self) -> np.ndarray:
        """Return a view (B, beams, 2, M) of the layer's kv_cache_block_offsets."""
        offsets = self.arguments["kv_cache_block_offsets"]
        return offsets[self.pool_number] if offsets.ndim == 5 else offsets

    def slot(self, token: int) -> int:
        """Return the slot of a token in a contiguous cache."""
        return find_slot(Call(**self.arguments), token, None)

    def list_reads(self, attention: Attention, by_mask: bool) -> set[TokenIndex]:
        """Return (request, beam, token) that are read from the cache; by_mask: without those that the masks hide."""
        result = set()
        for request in attention.requests:
            own = not request.generation and request.past == 0
            stored = (0 if own else request.encoder) if self.cross else request.past
            for i, row in enumerate(request.rows):
                p = request.position(i)
                for j in range(stored):
                    if not attention.in_window(request, p, j):
                        continue
                    if by_mask and not any(attention.by_mask(request, row, p, j, h) for h in range(self.heads)):
                        continue
                    result.add((request.index, attention.source_beam(request, i if request.generation else 0, j), j))
        return result

    def list_writes(self, requests: list[Request]) -> set[TokenIndex]:
        if self.cross:
            new = [request for request in requests if not request.generation and request.past == 0]
            return {(request.index, 0, j) for request in new for j in range(request.encoder)}
        return {
            (request.index, i if request.generation else 0, request.position(i))
            for request in requests
            for i in range(len(request.rows))
        }

    def add_caches(self) -> None:
        """Add the cache: numbers in the slots that the call reads, poison elsewhere."""
        case = self.case
        if case.cache == "none":
            return
        if case.quantized != "none":
            self.add_scales()
        dtype = CACHES.get(case.quantized, self.T)
        attention = Attention(Call(**self.arguments))
        reads, writes = self.list_reads(attention, False), self.list_writes(attention.requests)
        self.read, self.written = reads, writes
        if case.cache == "paged":
            self.add_pools(reads, writes, dtype)
        else:
            slots = [find_slot(attention.call, token, None) for _, _, token in reads | writes]
            rows = len(self.lengths.past) * self.beams + self.number(0, 1)
            shape = (rows, 2, self.kv_heads, max(slots) + 1 + self.number(0, 3), case.head_size)
            self.arguments["past_key_value"] = make_poison(shape, dtype, self.rng)
        self.fill(self.list_reads(attention, True) if case.poison_invisible else reads)

    def fill(self, tokens: set[TokenIndex]) -> None:
        cache = Cache(Call(**self.arguments))
        for request, beam, token in sorted(tokens):
            for which in (0, 1):
                values = self.normal(self.kv_heads, self.case.head_size)
                cache.write(request, beam, which, token, values)
        if "past_key_value" in self.arguments:
            self.arguments["past_key_value"] = cache.arrays[0]
        else:
            self.arguments["host_kv_cache_pool_pointers"] = cache.arrays

    def add_scales(self) -> None:
        """Add scales with which some values saturate; both directions differ, so that neither can replace the other."""
        several = 2 if self.case.scales == "two" else 1
        top = 127.0 if self.case.quantized == "int8" else 448.0
        there = [top / self.rng.uniform(1.5, 2.5) for _ in range(several)]
        self.arguments["kv_orig_quant_scale"] = surround_with_nan(there)
        self.arguments["kv_quant_orig_scale"] = surround_with_nan([self.rng.uniform(0.8, 1.2) / s for s in there])
        mode = INT8_MODE if self.case.quantized == "int8" else FP8_MODE
        self.arguments["kv_cache_quant_mode"] = mode | (3 if self.case.redundant else 0)

    def add_pools(self, reads: set[TokenIndex], writes: set[TokenIndex], dtype: np.dtype) -> None:
        """Add pools and kv_cache_block_offsets, nonsense in unused entries; written blocks are separate."""
        case, rng, size = self.case, self.rng, int(self.case.tokens_per_block)
        call = Call(**self.arguments)
        written: set[Entry] = {(b, beam, find_slot(call, token, size) // size) for b, beam, token in writes}
        read: set[Entry] = {(b, beam, find_slot(call, token, size) // size) for b, beam, token in reads}
        self.blocks_read, self.blocks_written = read, written
        twins = self.find_twins(read - written) if case.entries == "shared" else {}
        blocks = sorted((read | written) - set(twins))
        layer, layers, pool, pools, mapping = self.pool_layout()
        self.layer, self.pool_number = layer, pool
        group = 2 * layers
        spare = self.number(1, 4)
        flat = (len(blocks) + spare) * group
        if case.entries == "anywhere":
            numbers = rng.permutation(np.arange(2 * layer, flat))[: 2 * len(blocks)].reshape(-1, 2) - 2 * layer
        else:
            numbers = rng.permutation(len(blocks) + spare)[: len(blocks), None] * group + np.arange(2)
        entry = dict(zip(blocks, numbers))
        entry |= {twin: entry[block] for twin, block in twins.items()}
        beams = self.beams
        if case.phase == "context" and rng.random() < 0.5:
            beams = 1
        shape = (pools, len(self.lengths.past), beams, 2, max(column for _, _, column in entry) + 1 + self.number(0, 2))
        table = self.nonsense(shape)
        for (b, beam, column), pair in entry.items():
            table[pool, b, beam, :, column] = pair
        self.arguments["kv_cache_block_offsets"] = table if case.offsets_rank == 5 else table[pool]
        if case.redundant:
            self.arguments["host_kv_cache_block_offsets"] = self.nonsense(shape[1:])
        if mapping is not None:
            self.arguments["host_kv_cache_pool_mapping"] = self.array(mapping)
        arrays = []
        for n in range(pools):
            lead: tuple[int, ...] = (len(blocks) + spare,) if n == pool else (self.number(1, 3),)
            if case.pool != "rank 5":
                lead = (*lead, layers)
            arrays.append(make_poison((*lead, 2, self.kv_heads, size, case.head_size), dtype, rng))
        if case.holder == "array":
            self.arguments["past_key_value"] = arrays[0]
        else:
            self.arguments["host_kv_cache_pool_pointers"] = arrays

    def find_twins(self, only_read: set[Entry]) -> dict[Entry, Entry]:
        """Map blocks that are only read to the same column of another request or beam: {duplicate: original}."""
        twins: dict[Entry, Entry] = {}
        first: dict[int, Entry] = {}
        for entry in sorted(only_read):
            column = entry[2]
            if column in first:
                twins[entry] = first[column]
            else:
                first[column] = entry
        return twins

    def pool_layout(self) -> tuple[int, int, int, int, list[list[int]] | None]:
        """Return layer in the pool, layers of a pool, the pool, the number of pools, and host_kv_cache_pool_mapping."""
        case = self.case
        if case.pool == "rank 5":
            return 0, 1, 0, 1, None
        layers = self.number(max(2, case.layer + 1), 4)
        if case.pool == "rank 6":
            return case.layer, layers, 0, 1, None
        pools = self.number(2, 3) if case.pool == "many" else 1
        mapping = [
            [self.number(0, pools - 1), self.number(0, layers - 1)] for _ in range(case.layer + self.number(1, 3))
        ]
        pool, layer = mapping[case.layer]
        return layer, layers, pool, pools, mapping

    def redraw_uncertain_keys(self) -> None:
        """Draw keys again that float32 may quantize in either direction, if this call reads its own keys back."""
        case = self.case
        if case.quantized == "none" or self.cross:
            return
        if case.attend_current_unquantized and not case.fp8_context_fmha:
            return
        first, count = self.heads * case.head_size, self.kv_heads * case.head_size
        for _ in range(40):
            doubtful = uncertain_keys(**self.arguments).reshape(-1, count).any(axis=-1)
            if not doubtful.any():
                return
            qkv = self.arguments["qkv"]
            keys = qkv[1] if case.parts == "three" else qkv[..., first : first + count]
            flat = keys.reshape(-1, count)
            flat[doubtful] = self.normal(int(doubtful.sum()), count)
            keys[...] = flat.reshape(keys.shape)


def draw_arguments(case: Features, rng: np.random.Generator) -> Arguments:
    """Draw the arguments of one call, qkv among them."""
    return Drawing(case, rng).arguments
