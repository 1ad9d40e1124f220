"""Who is measured at serving. A contender that is not there, or does not compute a case, says so; that is recorded
and not fatal. `prepare` gives a function that computes launch `i` of a case and returns O, [total rows, heads,
head dim].

Those who know no pages get the same keys packed or in slots, copied before; the report says so.
"""

import os

import torch
import torch.nn.functional as F

from .contenders import Contender, Flashtune, Sdpa, load_fa3, refuse
from .serving_cases import MODEL_BOUND, PACKED, SLOTS
from .serving_data import E4M3


class Peer(Contender):
    """One implementation."""

    def prepare(self, case, data):
        raise NotImplementedError

    def slack(self, case):
        """What its answers may be off more than twice unfused attention's error, in parts of the largest element."""
        return 0.0

    def note(self, case):
        """What it was given in place of the case's own tensors, or how it computes."""
        return None


def bounds(case):
    """Arguments that say how many rows and keys a sequence has at most."""
    return {"max_seqlen_q": max(case.rows), "max_seqlen_k": max(case.lengths)}


class Ours(Peer, Flashtune):
    """This project, by its names of flash-attention's and vLLM's functions, with exact bounds and the step's
    lengths as a hint."""

    def load(self, device):
        if device == "cuda":
            # What was tuned for graphs, as it is measured.
            os.environ.setdefault("FLASHTUNE_LAUNCHES", "graph")
        super().load(device)

    def step(self, case):
        return self.flashtune.prepare_step((max(case.rows), max(case.lengths)), list(case.lengths))

    def prepare(self, case, data):
        step, table = self.step(case), self.table(case, data)
        options = {"causal": case.causal, "window_size": case.window_size, "softcap": case.soft_cap}
        options |= {"s_aux": data.sinks, "scheduler_metadata": step}
        if case.is_quantised:
            options |= {"k_descale": data.k_scale, "v_descale": data.v_scale}
        if case.store == SLOTS:
            attention, batched = self.flashtune.flash_attn_with_kvcache, (
                case.batch,
                max(case.rows),
                case.heads,
                case.head_dim,
            )
            refuse(
                not case.is_even and len(set(case.rows)) > 1, "slots are measured with as many rows for each sequence"
            )
            q = data.q.view(batched)
            return lambda i: attention(q, *data.store(i), cache_seqlens=data.lengths, **options).view(data.q.shape)
        attention = self.flashtune.flash_attn_varlen_func
        options |= {
            "cu_seqlens_q": data.first_rows,
            "max_seqlen_q": step.max_seqlen_q,
            "max_seqlen_k": step.max_seqlen_k,
        }
        if case.store == PACKED:
            return lambda i: attention(data.q, *data.store(i), cu_seqlens_k=data.first_keys, **options)
        options |= {"seqused_k": data.lengths}
        return lambda i: attention(data.q, *data.store(i), block_table=table(i), **options)

    def table(self, case, data):
        return data.table


class OursUnhinted(Ours):
    """The same with the bounds of a model of 128k and nothing said of the step."""

    def __init__(self):
        self.name = "flashtune_128k"

    def step(self, case):
        return self.flashtune.prepare_step((max(case.rows), MODEL_BOUND))

    def table(self, case, data):
        refuse(not case.is_paged or max(case.rows) > 16, "bounds of 128k are measured at decoding from pages")
        wide = {i: data.wide_table(i, MODEL_BOUND) for i in range(data.nodes)}
        return wide.__getitem__

    def note(self, case):
        return f"bounds of {MODEL_BOUND} keys, no hint"


class Fa3(Peer):
    """FlashAttention-3 as vLLM builds it: FA3_DIR (default /opt/fa3) holds
    vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so, and the CUDA 12 runtime that it needs under
    nvidia/cuda_runtime/lib."""

    name = "fa3"

    def load(self, device):
        load_fa3(device, "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
        self.forward = torch.ops._vllm_fa3_C.fwd

    def prepare(self, case, data):
        # It multiplies in e4m3 beside such a cache, so that its queries are of that type as well.
        q = data.q.to(E4M3) if case.is_quantised else data.q
        each = (case.batch, case.kv_heads)
        k_scale, v_scale = (s.expand(each) if case.is_quantised else None for s in (data.k_scale, data.v_scale))
        one = torch.ones(each, device=data.device) if case.is_quantised else None
        left, right = case.window_size
        packed = case.store == PACKED
        lengths, first_keys = (None, data.first_keys) if packed else (data.lengths, None)
        # Packed prompts fill the GPU; how often keys of a cache are split is the library's to say.
        splits = 1 if packed else 0

        def run(i):
            k, v = data.store(i)
            table = data.table(i) if case.is_paged else None
            new_k = new_v = q_of_v = out = first_new = rows = slots = pad = cos = sin = positions = plan = pack = None
            found = self.forward(
                q, k, v, new_k, new_v, q_of_v, out, data.first_rows, first_keys, first_new, rows, lengths,
                max(case.rows), max(case.lengths), table, slots, pad, cos, sin, positions, one, k_scale, v_scale,
                case.head_dim**-0.5, case.causal, left, right, case.soft_cap, False, plan, splits, pack, 0,
                data.sinks, 1, 0, None,
            )  # fmt: skip
            return found[0] if isinstance(found, (tuple, list)) else found

        return run

    def slack(self, case):
        # Three bits of mantissa of queries and of probabilities.
        return 0.1 if case.is_quantised else 0.0

    def note(self, case):
        return "queries and probabilities are e4m3, too" if case.is_quantised else None


def copied(case):
    """What those who know no pages are given."""
    return "keys without pages, copied before" if case.is_paged else None


def without_pages(case, data):
    refuse(case.is_quantised, "no quantised caches")
    refuse(case.sinks or case.soft_cap, "no sinks and no soft caps")
    refuse(not data.is_copied(), "launches read other pages of one store, and it knows no pages")


class Fa2(Peer):
    """FlashAttention-2 as PyTorch builds it: sequences of one size in a batch, where it splits keys, and others
    packed."""

    name = "fa2"

    def load(self, device):
        refuse(device == "cpu", "a CUDA kernel")
        self.forward = torch.ops.aten._flash_attention_forward

    def prepare(self, case, data):
        without_pages(case, data)
        left, right = case.window_size
        options = {"scale": case.head_dim**-0.5}
        if case.window is not None:
            options |= {"window_size_left": left, "window_size_right": right}
        rows, keys = max(case.rows), max(case.lengths)
        if case.is_even:
            q = data.q.view(case.batch, rows, case.heads, case.head_dim)
            of = (case.batch, keys, case.kv_heads, case.head_dim)
            each = lambda i: (q, *(t.view(of) for t in batched(case, data, i)), None, None)
        else:
            each = lambda i: (data.q, *data.packed(i), data.first_rows, data.first_keys)
        shape = data.q.shape
        return lambda i: self.forward(*each(i), rows, keys, 0.0, case.causal, False, **options)[0].reshape(shape)

    def note(self, case):
        return copied(case)

    def version(self):
        return f"torch {torch.__version__}"


def batched(case, data, i):
    """K and V of sequences of one length, of [batch, keys, kv_heads, head dim] in memory."""
    return data.store(i) if case.store == SLOTS else data.packed(i)


class Dense(Peer, Sdpa):
    """PyTorch's scaled_dot_product_attention on sequences of one size, with one of its backends where that is
    named."""

    def prepare(self, case, data):
        without_pages(case, data)
        refuse(not case.is_even, "no sequences of different lengths")
        rows, keys = case.rows[0], case.lengths[0]
        # One query at the end sees everything.
        causal = case.causal and rows > 1
        refuse(case.window is not None or causal and rows != keys, "no windows, and causal masks at the top left alone")
        q = data.q.view(case.batch, rows, case.heads, case.head_dim).transpose(1, 2)
        of = (case.batch, keys, case.kv_heads, case.head_dim)
        options = {"is_causal": causal, "enable_gqa": case.heads != case.kv_heads}

        def run(i):
            k, v = (t.view(of).transpose(1, 2) for t in batched(case, data, i))
            if self.backend is None:
                out = F.scaled_dot_product_attention(q, k, v, **options)
            else:
                with self.choose([self.backend]):
                    out = F.scaled_dot_product_attention(q, k, v, **options)
            return out.transpose(1, 2).reshape(data.q.shape)

        return run

    def note(self, case):
        return copied(case)


class Torch(Peer):
    """PyTorch's scaled_dot_product_attention, a call for each sequence, with a mask in memory where it needs one."""

    name = "torch"

    def prepare(self, case, data):
        without_pages(case, data)
        masks = [self.mask(case, data, b) for b in range(case.batch)]
        ends, keys = data.first_rows.tolist(), data.first_keys.tolist()

        def run(i):
            out = torch.empty_like(data.q)
            for b, mask in enumerate(masks):
                at = slice(ends[b], ends[b + 1])
                k, v = (self.of(case, data, t, b, keys) for t in batched(case, data, i))
                q = data.q[at].transpose(0, 1)[None]
                found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=case.heads != case.kv_heads)
                out[at] = found[0].transpose(0, 1)
            return out

        return run

    def of(self, case, data, t, b, keys):
        rows = t[b, : case.lengths[b]] if case.store == SLOTS else t[keys[b] : keys[b + 1]]
        return rows.transpose(0, 1)[None]

    def mask(self, case, data, b):
        rows, keys = case.rows[b], case.lengths[b]
        if case.window is None and (not case.causal or rows == 1):
            return None
        refuse(rows * keys > 1 << 28, "its mask would have over 256 Mi elements")
        at = torch.arange(rows, device=data.device)[:, None] + keys - rows
        key = torch.arange(keys, device=data.device)[None]
        seen = key <= at if case.causal else key >= 0
        return seen if case.window is None else seen & (key > at - case.window)

    def note(self, case):
        return copied(case)

    def version(self):
        return f"torch {torch.__version__}"


class CudnnPaged(Peer):
    """cuDNN's paged attention, by its Python frontend (nvidia-cudnn-frontend)."""

    name = "cudnn_paged"

    def load(self, device):
        refuse(device == "cpu", "a CUDA kernel")
        import cudnn

        self.cudnn, self.handle = cudnn, cudnn.create_handle()

    def version(self):
        return f"{self.cudnn.backend_version()}, frontend {self.cudnn.__version__}"

    def prepare(self, case, data):
        refuse(not case.is_paged or case.is_quantised, "measured on pages of 16-bit elements")
        refuse(case.sinks or case.soft_cap or case.window is not None, "measured without windows, sinks and soft caps")
        refuse(len(set(case.rows)) > 1, "measured with as many rows for each sequence")
        cudnn, rows = self.cudnn, case.rows[0]
        kind = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}[data.dtype]
        f32, device = cudnn.data_type.FLOAT, data.device
        graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=f32, compute_data_type=f32, handle=self.handle)
        q = data.q.view(case.batch, rows, case.heads, case.head_dim).transpose(1, 2)
        # Pages are [pages, kv_heads, tokens, head dim] by strides; a table is [batch, 1, width, 1].
        pages = lambda i: [t.transpose(1, 2) for t in data.store(i)]
        table = lambda i: data.table(i)[:, None, :, None]
        each = lambda n: n.view(-1, 1, 1, 1)
        q_rows = each(data.ints(case.rows))
        k, v = pages(0)
        tensors = [graph.tensor_like(t) for t in (q, k, v, table(0), table(0), q_rows, each(data.lengths))]
        causal = case.causal and rows > 1
        o, _ = graph.sdpa(
            name="sdpa", q=tensors[0], k=tensors[1], v=tensors[2], is_inference=True, attn_scale=case.head_dim**-0.5,
            use_causal_mask_bottom_right=causal, use_padding_mask=True, seq_len_q=tensors[5], seq_len_kv=tensors[6],
            paged_attention_k_table=tensors[3], paged_attention_v_table=tensors[4],
            paged_attention_max_seq_len_kv=max(case.lengths),
        )  # fmt: skip
        o.set_output(True).set_dim(list(q.shape)).set_stride(list(q.stride()))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)

        def run(i):
            out = torch.empty_like(q)
            self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
            given = (q, *pages(i), table(i), table(i), q_rows, each(data.lengths))
            graph.execute({**dict(zip(tensors, given)), o: out}, workspace, handle=self.handle)
            return out.transpose(1, 2).reshape(data.q.shape)

        return run


class FlashInfer(Peer):
    """FlashInfer's wrappers of paged decoding and prefill, planned once for a step as it asks for."""

    name = "flashinfer"

    def load(self, device):
        refuse(device == "cpu", "a CUDA kernel")
        import flashinfer

        self.flashinfer = flashinfer

    def version(self):
        return self.flashinfer.__version__

    def prepare(self, case, data):
        refuse(not case.is_paged, "measured on pages")
        refuse(case.sinks, "measured without sinks")
        refuse(len(data.tables) > 1, "a plan holds the pages of a step, and launches read other pages of one store")
        page, decoding = case.store, set(case.rows) == {1}
        ids = torch.cat([data.table(0)[b, :n] for b, n in enumerate(data.pages_of)])
        first = data.ints([sum(data.pages_of[:b]) for b in range(case.batch + 1)])
        last = data.ints([(n - 1) % page + 1 for n in case.lengths])
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=data.device)
        options = {
            "window_left": case.window_size[0], "logits_soft_cap": case.soft_cap, "q_data_type": data.dtype,
            "kv_data_type": data.element, "sm_scale": case.head_dim**-0.5,
        }  # fmt: skip
        heads = (case.heads, case.kv_heads, case.head_dim, page)
        if decoding:
            # Groups of four heads and more are multiplied by tensor cores.
            wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_cuda_graph=True, use_tensor_cores=case.heads // case.kv_heads >= 4,
                paged_kv_indptr_buffer=first.clone(), paged_kv_indices_buffer=ids.clone(),
                paged_kv_last_page_len_buffer=last.clone(),
            )  # fmt: skip
            wrapper.plan(first, ids, last, *heads, **options)
        else:
            wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", use_cuda_graph=True, qo_indptr_buf=data.first_rows.clone(),
                paged_kv_indptr_buf=first.clone(), paged_kv_indices_buf=ids.clone(),
                paged_kv_last_page_len_buf=last.clone(),
            )  # fmt: skip
            wrapper.plan(data.first_rows, first, ids, last, *heads, causal=case.causal, **options)
        scales = {}
        if case.is_quantised:
            refuse(case.kv_heads > 1, "its scales are one for all heads")
            scales = {"k_scale": data.k_scale.item(), "v_scale": data.v_scale.item()}
        return lambda i: wrapper.run(data.q, data.store(i), **scales)


def known():
    """Every contender, by name."""
    peers = [
        Ours(),
        OursUnhinted(),
        Fa3(),
        Fa2(),
        Dense("cudnn", "CUDNN_ATTENTION"),
        CudnnPaged(),
        FlashInfer(),
        Torch(),
    ]
    return {peer.name: peer for peer in peers}


DEFAULT = {
    "cuda": "flashtune,flashtune_128k,fa3,fa2,cudnn,cudnn_paged,flashinfer",
    "cpu": "flashtune,flashtune_128k,torch",
}
