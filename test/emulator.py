"""Inkling with MTP heads in plain torch, for one request: what a GPU server does, on a CPU.

Follows the published architecture (`transformers` ships it, and ``test_tiny.py`` compares the two)
and, for speculation, what SGLang's multi-layer EAGLE worker does with chains of one candidate:
after every verification each head runs over the verified rows, and its last accepted row gives one
draft token. Values are rounded to bf16 where the server stores them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file

# The tensors are small: on a busy machine, waiting for a second thread takes ten times as long.
torch.set_num_threads(1)

FRONT_WARMUP = 3
"""Rows that the boundary-KV fix adds to rebuild the conv window, and whose KV it drops."""


def _round(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


class Block:
    """A decoder layer. Its weights; the request's part is in ``State``."""

    def __init__(self, weights: dict[str, torch.Tensor], config: dict, window: int | None):
        self.w = weights
        self.heads, self.dim = config["num_attention_heads"], config["head_dim"]
        self.kv_heads = config["num_key_value_heads"]
        self.window = window

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return _round(x @ self.w[name].T)

    def conv(self, x: torch.Tensor, name: str, state: State) -> torch.Tensor:
        """``x + causal_conv(x)``."""
        before = state.conv[name][:3] if name in state.conv else torch.zeros(3, x.shape[1])
        rows = state.conv[name] = torch.cat((before, x))
        taps = self.w[f"{name}.weight"].squeeze(1)
        mixed = sum(rows[i : i + len(x)] * taps[:, i] for i in range(4))
        return _round(x + mixed)

    def __call__(self, x: torch.Tensor, state: State, start: int, keep: int = 0) -> torch.Tensor:
        """``x`` [rows, hidden] at positions from ``start`` on. KV of the first ``keep`` rows is
        left as it is in the cache."""
        rows = len(x)
        h = _rms_norm(x, self.w["attn_norm.weight"])
        q = self.linear(h, "attn.wq_du.weight").view(rows, self.heads, self.dim)
        k = self.conv(self.linear(h, "attn.wk_dv.weight"), "attn.k_sconv", state)
        v = self.conv(self.linear(h, "attn.wv_dv.weight"), "attn.v_sconv", state)
        r = self.linear(h, "attn.wr_du.weight").view(rows, self.heads, -1)
        q = _rms_norm(q, self.w["attn.q_norm.weight"])
        k = _rms_norm(k.view(rows, self.kv_heads, self.dim), self.w["attn.k_norm.weight"])
        v = v.view(rows, self.kv_heads, self.dim)
        first = start + keep
        state.k = torch.cat((state.k[:first], k[keep:])) if state.k is not None else k
        state.v = torch.cat((state.v[:first], v[keep:])) if state.v is not None else v

        group = self.heads // self.kv_heads
        keys = state.k.repeat_interleave(group, dim=1)
        values = state.v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / self.dim
        bias = _round(r @ self.w["attn.rel_logits_proj.proj"]).transpose(0, 1)
        distance = (start + torch.arange(rows))[:, None] - torch.arange(len(keys))[None]
        extent = bias.shape[-1]
        bias = bias.gather(-1, distance.clamp(0, extent - 1).expand(self.heads, -1, -1))
        scores = scores + bias.masked_fill(distance >= extent, 0)
        hidden = distance < 0
        if self.window is not None:
            hidden = hidden | (distance >= self.window)
        scores = scores.masked_fill(hidden, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        out = self.linear(_round(mixed).reshape(rows, -1), "attn.wo_ud.weight")
        x = _round(x + self.conv(out, "attn_sconv", state))
        out = self.mlp(_rms_norm(x, self.w["mlp_norm.weight"]))
        return _round(x + self.conv(out, "mlp_sconv", state))

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        if "mlp.w13_dn.weight" in self.w:
            z = self.linear(h, "mlp.w13_dn.weight")
            inner = _round(F.silu(z[:, ::2]) * z[:, 1::2])
            return _round(self.linear(inner, "mlp.w2_md.weight") * self.w["mlp.global_scale"])
        logits = h @ self.w["mlp.gate.weight"].T
        experts = len(self.w["mlp.gate.bias"])
        chosen = (logits[:, :experts].sigmoid() + self.w["mlp.gate.bias"]).topk(2).indices
        # The shared experts come last, and each row uses all of them.
        shared = torch.arange(experts, logits.shape[1]).expand(len(h), -1)
        used = torch.cat((chosen, shared), dim=1)
        gates = F.logsigmoid(logits.gather(1, used)).softmax(-1) * self.w["mlp.gate.global_scale"]
        gates = torch.zeros_like(logits).scatter(1, used, gates)
        w13, w2 = (
            torch.cat((self.w[f"mlp.experts.{w}"], self.w[f"mlp.shared_experts.shared_{w}"]))
            for w in ("w13_weight", "w2_weight")
        )
        z = torch.einsum("eih,rh->rei", w13, h)
        outputs = torch.einsum("ehi,rei->reh", w2, F.silu(z[..., ::2]) * z[..., 1::2])
        return _round(torch.einsum("re,reh->rh", gates, outputs))


@dataclass
class State:
    """One request's KV ``[tokens, kv heads, dim]`` and conv windows ``[3, channels]`` in a block.

    Between a forward pass and ``commit`` a window is followed by the rows of that pass.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    conv: dict[str, torch.Tensor] = field(default_factory=dict)

    def commit(self, rows: int) -> None:
        """Move the windows to where they are after the first ``rows`` rows of the pass."""
        self.conv = {name: window[rows : rows + 3] for name, window in self.conv.items()}


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _round(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight)


class Model:
    """Target and MTP heads of a checkpoint that ``inkling_sconv.tiny`` wrote."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())["text_config"]
        tensors = load_file(folder / "model.safetensors")
        self.w = {name: tensor.float() for name, tensor in tensors.items()}
        local, window = self.config["local_layer_ids"], self.config["sliding_window_size"]
        self.layers = [
            self._block(f"model.llm.layers.{i}.", window if i in local else None)
            for i in range(self.config["num_hidden_layers"])
        ]
        self.heads = [
            self._block(
                f"model.mtp.layers.{i}.transformer_block.",
                self.config["mtp_local_extent"]
                if i in self.config["mtp_local_layer_ids"]
                else None,
            )
            for i in range(self.config["num_nextn_predict_layers"])
        ]

    def _block(self, prefix: str, window: int | None) -> Block:
        weights = {
            name.removeprefix(prefix): tensor
            for name, tensor in self.w.items()
            if name.startswith(prefix)
        }
        return Block(weights, self.config, window)

    def __deepcopy__(self, memo: object) -> Model:
        """Copies of a request share the weights."""
        return self

    def embed(self, tokens: list[int]) -> torch.Tensor:
        rows = self.w["model.llm.embed.weight"][tokens]
        return _rms_norm(rows, self.w["model.llm.embed_norm.weight"])

    def target(self, tokens: list[int], states: list[State], start: int) -> torch.Tensor:
        x = self.embed(tokens)
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, state, start)
        return _rms_norm(x, self.w["model.llm.norm.weight"])

    def head(
        self, index: int, hidden: torch.Tensor, tokens: list[int], state: State, start: int, keep=0
    ) -> torch.Tensor:
        prefix = f"model.mtp.layers.{index}."
        h = _rms_norm(hidden, self.w[f"{prefix}hidden_norm.weight"])
        e = _rms_norm(self.embed(tokens), self.w[f"{prefix}embed_norm.weight"])
        x = _round(torch.cat((h, e), dim=1) @ self.w[f"{prefix}input_proj.weight"].T)
        x = self.heads[index](x, state, start, keep)
        return _rms_norm(x, self.w["model.mtp.chain_norm.weight"])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return _round(hidden @ self.w["model.llm.unembed.weight"].T)


class Request:
    """A request under greedy decoding with the checkpoint's MTP heads as the draft."""

    def __init__(self, model: Model, *, boundary_fix: bool = True, steps: int = 2):
        self.model, self.boundary_fix, self.steps = model, boundary_fix, steps
        self.target = [State() for _ in model.layers]
        self.draft = [State() for _ in range(steps)]
        self.length = 0
        self.front = steps - 1 + FRONT_WARMUP
        self.stash: list[tuple[int, torch.Tensor]] = []

    def zero_draft_conv(self) -> None:
        for state in self.draft:
            state.conv = {name: torch.zeros_like(rows) for name, rows in state.conv.items()}

    def prefill(self, tokens: list[int], keep: int | None = None) -> None:
        """Append ``tokens`` to what is in the cache, and draft from there.

        With ``keep``, leave the cache as a prefix hit on the first ``keep`` of them finds it.
        """
        model, rows = self.model, len(tokens)
        hidden = model.target(tokens, self.target, self.length)
        self.bonus = int(model.logits(hidden[-1:]).argmax())
        ids = [*tokens[1:], self.bonus]
        self.stash = list(zip(ids, hidden, strict=True))[-self.front :]
        self.drafts = []
        for step in range(self.steps):
            hidden = model.head(step, hidden, ids, self.draft[step], self.length)
            self.drafts.append(int(model.logits(hidden[-1:]).argmax()))
            ids = [*ids[1:], self.drafts[-1]]
        for state in (*self.target, *self.draft):
            state.commit(rows if keep is None else keep)
        self.length += rows if keep is None else keep

    def step(self) -> list[int]:
        """Verify the draft, and draft again: the tokens that are new after the bonus token."""
        model = self.model
        tokens = [self.bonus, *self.drafts]
        hidden = model.target(tokens, self.target, self.length)
        predicted = model.logits(hidden).argmax(-1).tolist()
        accepted = 1
        while accepted < len(tokens) and tokens[accepted] == predicted[accepted - 1]:
            accepted += 1
        self._draft(predicted, hidden, accepted)
        for state in (*self.target, *self.draft):
            state.commit(accepted)
        verified = list(zip(predicted, hidden, strict=True))[:accepted]
        self.stash = (self.stash + verified)[-self.front :]
        self.length += accepted
        self.bonus = predicted[accepted - 1]
        return predicted[:accepted]

    def _draft(self, ids: list[int], hidden: torch.Tensor, accepted: int) -> None:
        model, front, keep, last = self.model, 0, 0, accepted - 1
        if self.boundary_fix:
            # Rows before the window come along, conv windows start from zero, and only the last of
            # these rows rewrite their KV. Slots that hold nothing yet count as token 0.
            front = self.front
            missing = front - len(self.stash)
            keep = min(missing + FRONT_WARMUP, front)
            ids = [0] * missing + [token for token, _ in self.stash] + ids
            filler = [torch.zeros_like(hidden[0])] * missing
            hidden = torch.cat((torch.stack([*filler, *(h for _, h in self.stash)]), hidden))
            last += front
        self.drafts = []
        for step in range(self.steps):
            state = self.draft[step]
            if self.boundary_fix:
                state.conv = {}
            hidden = model.head(step, hidden, ids, state, self.length - front, keep)
            self.drafts.append(int(model.logits(hidden[last : last + 1]).argmax()))
            ids = [*ids[1:], ids[-1]]
            ids[last] = self.drafts[-1]

    def run(self, new_tokens: int, *, zero_draft: bool = False) -> tuple[list[int], list[int]]:
        """Decode at least ``new_tokens``: returns them, and how many each verification gave.

        With ``zero_draft``, the draft's conv windows are zeroed before every draft step.
        """
        tokens, lens = [self.bonus], []
        while len(tokens) < new_tokens:
            if zero_draft:
                self.zero_draft_conv()
            new = self.step()
            tokens += new
            lens.append(len(new))
        return tokens, lens
