"""gpt_attention in float64, written from its description alone: loops over requests, rows, heads and keys.

Values are rounded exactly where the description says so: biased and rotated Q, K and V once to the type of qkv, K and V
when they are written in 8 bits or take the round trip, Q for the context in e4m3. All else is float64. Errors are not
checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.serving.gpt_attention.gpt_cache_reference import E4M3_MAX, Cache, Call, to_e4m3
from tests.serving.gpt_attention.gpt_rotary_reference import POSITION_TYPES, Rotation, find_name, make_rotation
from tests.serving.gpt_attention.gpt_score_reference import MASK_TYPES, compute_slopes, find_bucket, unpack_mask


@dataclass(frozen=True)
class Request:
    """One request of a call. Row i is `rows[i]` of qkv with its leading axes flattened."""

    index: int
    generation: bool
    past: int
    length: int  # with this call's tokens
    prompt: int  # context_lengths
    encoder: int  # tokens of the encoder; 0 without cross attention
    rows: range

    def position(self, row: int) -> int:
        return self.length - 1 if self.generation else self.past + row


@dataclass(frozen=True)
class Token:
    """This call's K or V of one token: `exact` float64 (Hkv, D), off by at most `error` in float32, rounded to T."""

    request: int
    beam: int
    which: int  # 0 K, 1 V
    token: int
    exact: np.ndarray
    error: np.ndarray
    row: int


class Attention:
    """One call in parts: requests, this call's K and V, and visibility."""

    def __init__(self, call: Call) -> None:
        self.call = call
        arrays = [np.asarray(array) for array in call.qkv] if isinstance(call.qkv, (list, tuple)) else [call.qkv]
        whole = np.concatenate(arrays, axis=-1)
        self.dtype = whole.dtype
        self.lead = whole.shape[:-1]
        self.x = whole.reshape(-1, whole.shape[-1])  # (rows, columns)
        self.padded = whole.ndim == 3
        self.cache = Cache(call)
        self.requests = list(self._requests())
        self.norm = float(call.q_scaling) * math.sqrt(call.hidden_size_per_head)
        self.mask: np.ndarray | None = None
        self.mask_type = find_name(call.mask_type, MASK_TYPES)
        if call.attention_mask is not None or call.attention_packed_mask is not None:
            self.mask_type = "custom_mask"
            self.mask = unpack_mask(call)
        self.position_type = find_name(call.position_embedding_type, POSITION_TYPES)
        if call.alibi_slopes is not None:
            self.slopes = np.asarray(call.alibi_slopes, np.float64)
        else:
            first = call.tp_rank * call.num_heads
            self.slopes = compute_slopes(call.num_heads * call.tp_size)[first : first + call.num_heads]
        self.bias = None
        if call.relative_attention_bias is not None:
            self.bias = np.asarray(call.relative_attention_bias).astype(np.float64)

    def _requests(self) -> Iterator[Request]:
        call = self.call
        assert call.context_lengths is not None
        prompts = [int(v) for v in call.context_lengths]
        requests = len(prompts)
        types, past, lengths = [0] * requests, [0] * requests, prompts
        if call.use_cache:
            assert call.host_request_types is not None and call.sequence_length is not None
            assert call.host_past_key_value_lengths is not None
            types = [int(v) for v in call.host_request_types]
            past = [int(v) for v in call.host_past_key_value_lengths]
            per_request = len(call.sequence_length) // requests  # 1, or beams in the long form
            lengths = [int(v) for v in call.sequence_length[::per_request]]
        start = 0
        for b in range(requests):
            rows = range(start, start + (call.beams if types[b] else prompts[b]))
            if self.padded and not types[b]:
                rows = range(b * self.lead[1], b * self.lead[1] + prompts[b])
            start += len(rows)
            encoder = 0 if call.encoder_input_lengths is None else int(call.encoder_input_lengths[b])
            yield Request(b, bool(types[b]), past[b], lengths[b], prompts[b], encoder, rows)

    # this call's Q, K and V

    def biased(self, row: int, first: int, heads: int) -> np.ndarray:
        """Return float32 (heads, D) of the columns of a row from head `first` on, with the bias."""
        size = self.call.hidden_size_per_head
        columns = slice(first * size, (first + heads) * size)
        values = self.x[row, columns].astype(np.float32)
        if self.call.qkv_bias is not None:
            values = values + np.asarray(self.call.qkv_bias).reshape(-1)[columns].astype(np.float32)
        return values.reshape(heads, size)

    def rotation(self, request: Request) -> Rotation | None:
        length = request.length
        if request.generation and self.call.streamingllm:
            length = self.streaming_position(request) + 1
        dynamic = self.call.rotary_embedding_scale_type in (2, "dynamic")
        if dynamic and request.generation and self.call.trt_mmha_compat:
            length -= 1
        return make_rotation(self.call, length)

    def streaming_position(self, request: Request) -> int:
        """Return n: the earlier keys within the window, and so the position of the query in a generation step."""
        return sum(self.in_window(request, request.length - 1, j) for j in range(request.past))

    def turned(self, values: np.ndarray, turn: Rotation | None, position: int) -> tuple[np.ndarray, np.ndarray]:
        if turn is None:
            return values.astype(np.float64), np.zeros(values.shape)
        return turn.rotate(values, position)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Round once to T."""
        return values.astype(self.dtype)

    def tokens(self) -> Iterator[Token]:
        """Yield K and V that this call adds, in order, before rounding to T and before their KV write."""
        call = self.call
        if call.do_cross_attention:
            yield from self._encoder_tokens()
            return
        for request in self.requests:
            turn = None if call.streamingllm else self.rotation(request)
            for i, row in enumerate(request.rows):
                p, beam = request.position(i), i if request.generation else 0
                k = self.biased(row, call.num_heads, call.kv_heads)
                v = self.biased(row, call.num_heads + call.kv_heads, call.kv_heads)
                yield Token(request.index, beam, 0, p, *self.turned(k, turn, p), row)
                yield Token(request.index, beam, 1, p, v.astype(np.float64), np.zeros(v.shape), row)

    def _encoder_tokens(self) -> Iterator[Token]:
        """Yield tokens of cross_kv, which contains only context requests without a past, packed or padded."""
        writers = [request for request in self.requests if not request.generation and request.past == 0]
        if not writers:
            return
        assert self.call.cross_kv is not None
        cross_kv = np.asarray(self.call.cross_kv)
        heads, size = self.call.kv_heads, self.call.hidden_size_per_head
        start = 0
        for n, request in enumerate(writers):
            rows = cross_kv[n] if cross_kv.ndim == 3 else cross_kv[start:]
            start += request.encoder
            for j in range(request.encoder):
                pair = rows[j].astype(np.float64).reshape(2, heads, size)
                for which in (0, 1):
                    yield Token(request.index, 0, which, j, pair[which], np.zeros((heads, size)), -1)

    def round_trips(self, request: Request) -> bool:
        """Return whether this call's K and V are used as they come back from the cache."""
        fp8 = self.call.use_fp8_context_fmha and not request.generation
        return self.call.quantized and (fp8 or not self.call.attend_current_unquantized)

    def own(self, token: Token, request: Request, turn: Rotation | None, position: int) -> np.ndarray:
        """Return float64 (Hkv, D): this call's K or V as attention uses it, K of streamingllm rotated to `position`."""
        late = self.call.streamingllm and token.which == 0 and turn is not None
        values = self.rounded(token.exact)
        if self.round_trips(request):
            used = self.cache.used(self.cache.quantize(values, token.which), token.which)
            return self.turned(used, turn, position)[0] if late else used
        if late:
            values = self.rounded(self.turned(token.exact.astype(np.float32), turn, position)[0])
        return values.astype(np.float64)

    # visibility

    def in_window(self, request: Request, p: int, j: int) -> bool:
        call = self.call
        window, sinks = call.window, call.sinks
        if call.do_cross_attention or window is None or (call.streamingllm and not request.generation):
            return True
        oldest = p - (window - sinks) + 1
        if call.trt_mmha_compat and request.generation:
            oldest -= 1
        return j < sinks or j >= oldest

    def block_sparse(self, p: int, j: int, head: int) -> bool:
        call = self.call
        size, stride = call.block_sparse_block_size, call.block_sparse_vertical_stride
        step = 0
        if not call.block_sparse_homo_head_pattern:
            step = max(1, stride // (call.num_heads * call.tp_size))
        head += call.tp_rank * call.num_heads
        near = p // size - j // size < call.block_sparse_num_local_blocks
        return near or (j // size + head * step + 1) % stride == 0

    def by_mask(self, request: Request, row: int, p: int, j: int, head: int) -> bool:
        """Return the mask type's rule for query position p, which is row `row` of qkv, and key position j."""
        last = request.length - 1
        if self.mask_type == "custom_mask":
            assert self.mask is not None
            return bool(self.mask[row, j])
        if self.call.do_cross_attention:
            return True
        if self.mask_type == "blocksparse":
            return j <= p and self.block_sparse(p, j, head)
        if request.generation or self.mask_type in ("causal", "sliding_window_causal"):
            return j <= p
        if self.mask_type in ("bidirectional", "bidirectionalglm"):
            return j < last or (p == last and j == last)
        assert self.mask_type == "padding", self.mask_type
        return True

    def keys(self, request: Request) -> range:
        return range(request.encoder if self.call.do_cross_attention else request.length)

    def visible(self, request: Request, i: int, head: int) -> list[int]:
        """Return the keys that row i of a request sees, by token."""
        p, row = request.position(i), request.rows[i]
        return [
            j for j in self.keys(request) if self.in_window(request, p, j) and self.by_mask(request, row, p, j, head)
        ]

    # scores

    def added(self, request: Request, head: int, p: int, j: int) -> float:
        """Return ALiBi and the relative bias of positions p and j."""
        total = 0.0
        if self.position_type in ("alibi", "alibi_with_scale"):
            scale = 1 / self.norm if self.position_type == "alibi_with_scale" else 1.0
            total += self.slopes[head] * (j - p) * scale
        if self.bias is not None:
            if self.call.max_distance > 0:
                is_bidirectional = self.call.relative_attention_bidirectional and not request.generation
                buckets = self.bias.shape[1]
                total += self.bias[head, find_bucket(j - p, buckets, self.call.max_distance, is_bidirectional)]
            else:
                total += self.bias[head, p, j]
        return float(total)

    def query(self, request: Request, row: int, turn: Rotation | None, position: int) -> np.ndarray:
        """Return float64 (Hq, D), with logn, in e4m3 where use_fp8_context_fmha is set."""
        values = self.turned(self.biased(row, 0, self.call.num_heads), turn, position)[0]
        result = self.rounded(values).astype(np.float64)
        if self.call.logn_scaling is not None:
            result = result * float(np.asarray(self.call.logn_scaling).reshape(-1)[position])
        if self.call.use_fp8_context_fmha and not request.generation:
            result = to_e4m3(result.astype(np.float32)).astype(np.float64)
        return result

    def source_beam(self, request: Request, beam: int, token: int) -> int:
        if token < request.prompt or not request.generation or self.call.do_cross_attention:
            return 0
        assert self.call.cache_indirection is not None or beam == 0
        if self.call.cache_indirection is None:
            return 0
        source = int(self.call.cache_indirection[request.index, beam, token])
        assert 0 <= source < self.call.beams
        return source

    def attend(self, request: Request, own: dict[tuple[int, int, int], Token]) -> Iterator[tuple[int, int, Any, float]]:
        """Yield (row of qkv, head, output float64 (D), log of the sum of the exponents) of a request."""
        call = self.call
        turn = self.rotation(request)
        group = call.num_heads // call.kv_heads
        reads: dict[tuple[int, int, int], np.ndarray] = {}
        for i, row in enumerate(request.rows):
            beam = i if request.generation else 0
            p = request.position(i)
            positions = {j: j for j in self.keys(request)}  # the position of a key
            if call.streamingllm and request.generation:
                window = [j for j in range(request.length) if self.in_window(request, p, j)]
                positions = {j: n for n, j in enumerate(window)}
            here = p if call.do_cross_attention else positions[p]
            q = self.query(request, row, turn, here)
            values: dict[tuple[int, int], np.ndarray] = {}
            for head in range(call.num_heads):
                seen = self.visible(request, i, head)
                if not seen:
                    yield row, head, np.zeros(call.hidden_size_per_head), -math.inf
                    continue
                for j in seen:
                    for which in (0, 1):
                        if (which, j) in values:
                            continue
                        token = own.get((0 if call.do_cross_attention else beam, which, j))
                        if token is not None:
                            values[which, j] = self.own(token, request, turn, positions[j])
                            continue
                        source = self.source_beam(request, beam, j)
                        if (source, which, j) not in reads:
                            reads[source, which, j] = self.cache.read(request.index, source, which, j)
                        read = reads[source, which, j]
                        late = call.streamingllm and which == 0
                        values[which, j] = self.turned(read, turn, positions[j])[0] if late else read
                scores = np.array([q[head] @ values[0, j][head // group] for j in seen]) / self.norm
                if call.attn_logit_softcapping_scale > 0:
                    cap = call.attn_logit_softcapping_scale
                    scores = cap * np.tanh(scores / cap)
                scores = scores + np.array([self.added(request, head, here, positions[j]) for j in seen])
                largest = scores.max()
                weights = np.exp(scores - largest)
                total = weights.sum()
                output = weights @ np.array([values[1, j][head // group] for j in seen]) / total
                yield row, head, output, float(largest + math.log(total))

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """Return context float64 (rows, Hq, D) and lse float64 (rows, Hq)."""
        call = self.call
        context = np.zeros((len(self.x), call.num_heads, call.hidden_size_per_head))
        lse = np.full((len(self.x), call.num_heads), -np.inf)
        own: dict[int, dict[tuple[int, int, int], Token]] = {request.index: {} for request in self.requests}
        for token in self.tokens():
            own[token.request][token.beam, token.which, token.token] = token
        for request in self.requests:
            for row, head, output, log in self.attend(request, own[request.index]):
                context[row, head], lse[row, head] = output, log
        return context, lse

    def store(self, cache: Cache, side: int = 0) -> list[np.ndarray]:
        """Return the caches with this call's tokens; side -1 and +1 move each by its error before rounding to T."""
        if not self.call.use_cache:
            return []
        for token in self.tokens():
            values = self.rounded(token.exact + side * token.error)
            cache.write(token.request, token.beam, token.which, token.token, values)
        return cache.arrays


def gpt_attention(qkv: Any, **arguments: Any) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return context float64 (N, Hq*D) or (R, S, Hq*D), lse float64 (N, Hq) or (R, S, Hq), the caches after the call.

    The arguments are those of the operator; none is changed. The caches are new arrays: none, the contiguous cache, or
    all pools in order. With attention_output_orig_quant_scale the context is out * scale within +-448, not yet rounded
    to e4m3, so that a test sees where rounding may go in either direction.
    """
    attention = Attention(Call(qkv=qkv, **arguments))
    call = attention.call
    context, lse = attention.run()
    if call.attention_output_orig_quant_scale is not None:
        scale = float(np.asarray(call.attention_output_orig_quant_scale).reshape(-1)[0])
        context = np.clip(context * scale, -E4M3_MAX, E4M3_MAX)
    caches = attention.store(Cache(call))
    columns = call.num_heads * call.hidden_size_per_head
    return context.reshape(*attention.lead, columns), lse.reshape(*attention.lead, call.num_heads), caches


def cache_bounds(qkv: Any, **arguments: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the caches after the call with every rotated key as small, and as large, as float32 may make it.

    Where both agree to the bit a cached value must be this one, elsewhere one between.
    """
    attention = Attention(Call(qkv=qkv, **arguments))
    low, high = (attention.store(Cache(attention.call), side) for side in (-1, 1))
    return low, high


def uncertain_keys(qkv: Any, **arguments: Any) -> np.ndarray:
    """Return bool (rows, Hkv, D): rotated keys of this call that float32 may quantize to either of two values.

    Where this call's own keys take the round trip, such a key changes the context by more than rounding does.
    """
    attention = Attention(Call(qkv=qkv, **arguments))
    result = np.zeros((len(attention.x), attention.call.kv_heads, attention.call.hidden_size_per_head), bool)
    if not attention.call.quantized:
        return result
    for token in attention.tokens():
        if token.which == 0 and token.row >= 0:
            low, high = (
                attention.cache.quantize(attention.rounded(token.exact + side * token.error), 0) for side in (-1, 1)
            )
            result[token.row] = low != high
    return result
