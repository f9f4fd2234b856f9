"""The optimizer: Muon for the matrices of the transformer layers, AdamW for all other parameters.

    optimizer = build_optimizer(model, unembedding_lr, embedding_lr, matrix_lr, scalar_lr, weight_decay)
    optimizer.set_schedule(lr_multiplier, momentum, weight_decay_multiplier)
    loss.backward()
    optimizer.step()                    # one process; or, divided among ranks:
    optimizer.step_adamw()              # elementwise and fused: the same bits on every CPU
    optimizer.step_muon(owned)          # GEMMs, on the owner rank only, which broadcasts the result

Different CPUs round GEMMs differently, and one CPU rounds a batch of matrices differently from a single
matrix. Each matrix is therefore updated by itself, from its gradient, value and state only: the result does
not depend on the other matrices of its owner rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from trainer.optim.row_adamw import RowAdamW, fresh_adamw_state, fused_adamw

# Five steps towards the orthogonal factor: The Polar Express, arXiv 2505.16932.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
GRAM_FROM = 2.0  # longer over shorter side; the Gram matrix needs fewer FLOPs from 1.5 on, 45 % fewer at 4
ADAMW_EPS = 1e-10
REFERENCE_WIDTH = 768  # the n_embd at which the rates of embeddings and lm_head were tuned
SMEAR_LR = 0.2  # of smear and backout; the one rate that is not scaled for the batch

ParameterState = dict[str, Tensor]


class MuonMatrix(NamedTuple):
    """A matrix that Muon updates.

    name: the name of the parameter. parameter: the matrix, (rows, cols). flops: the FLOPs of an update of the
    matrix; matrices are assigned to owner ranks by this number.
    """

    name: str
    parameter: Parameter
    flops: int


def width_scale(n_embd: int) -> float:
    """The factor of the learning rates of embeddings and lm_head in a model of width `n_embd`."""
    return (n_embd / REFERENCE_WIDTH) ** -0.5


def polar_express(X: Tensor) -> Tensor:
    """Approximate the orthogonal polar factor of X (rows, cols) by five iterations; returns it.

    The spectral norm of X must be below 1. The Polar Express, arXiv 2505.16932.
    """
    tall = X.size(0) > X.size(1)
    if goes_by_gram(X.size(0), X.size(1), X.dtype):
        P = _polar_express_of_gram(X.mT @ X if tall else X @ X.mT)
        return X @ P if tall else P @ X
    for a, b, c in POLAR_EXPRESS:
        A = X.mT @ X if tall else X @ X.mT
        B = torch.addmm(A, A, A, beta=b, alpha=c)
        X = torch.addmm(X, X, B, beta=a) if tall else torch.addmm(X, B, X, beta=a)
    return X


def _polar_express_of_gram(A: Tensor) -> Tensor:
    """The matrix that has the effect of all five iterations when X is multiplied by it.

    A: the Gram matrix of X. Each iteration replaces X by its product with a polynomial in A, and these
    polynomials commute.
    """
    P = A
    for step, (a, b, c) in enumerate(POLAR_EXPRESS):
        Q = torch.addmm(A, A, A, beta=b, alpha=c)
        Q.diagonal().add_(a)
        P = Q @ P if step else Q
        if step + 1 < len(POLAR_EXPRESS):
            A = Q @ A @ Q
    return P


def goes_by_gram(rows: int, cols: int, dtype: torch.dtype) -> bool:
    """Whether `polar_express` uses the Gram matrix.

    True if one side is at least GRAM_FROM times the other side, so that this saves FLOPs, and the dtype is
    float32 or float64. A narrower dtype is not precise enough, as the Gram matrix squares the condition
    number.
    """
    return max(rows, cols) >= GRAM_FROM * min(rows, cols) and dtype in (torch.float32, torch.float64)


def polar_express_flops(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> int:
    """FLOPs of `polar_express` for a (rows, cols) matrix in the number format `dtype`."""
    m, n = min(rows, cols), max(rows, cols)
    if goes_by_gram(rows, cols, dtype):
        return 4 * m * m * n + (4 * len(POLAR_EXPRESS) - 3) * 2 * m**3
    return len(POLAR_EXPRESS) * (4 * m * m * n + 2 * m**3)


def orthogonalize(G: Tensor, compute_dtype: torch.dtype | None = None) -> Tensor:
    """Approximate the orthogonal polar factor of G (rows, cols) after scaling the rows of G to equal norms.

    The rows are scaled because the matrix is then better conditioned (arXiv 2603.28254); the result differs
    from the polar factor of G itself. It has G's shape and the Frobenius norm sqrt(min(rows, cols)); it is
    zero if G is zero. GEMMs are computed in `compute_dtype`, by default G's dtype; norms and the result have
    G's dtype.
    """
    rows, cols = G.shape
    row_norms = G.norm(dim=1, keepdim=True).clamp_min(1e-6)
    G = G * (G.norm() / rows**0.5 / row_norms)
    X = polar_express((G / (1.01 * G.norm() + 1e-6)).to(compute_dtype or G.dtype)).to(G.dtype)
    return X * (min(rows, cols) ** 0.5 / X.norm().clamp_min(1e-6))


def reduce_variance(X: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """Divide X's rows (or columns) by the root of their running mean square, then restore the norm of X.

    `second_moment` (rows, 1) or (1, cols) is updated in place; its shape selects rows or columns. NorMuon,
    arXiv 2510.05491.
    """
    axis = 1 if second_moment.size(1) == 1 else 0
    mean_square = X.square().mean(dim=axis, keepdim=True)
    second_moment.lerp_(mean_square, 1 - beta2)
    step = second_moment.clamp_min(1e-10).rsqrt()
    norm = (mean_square.sum() * X.size(axis)).sqrt()
    new_norm = ((mean_square * step.square()).sum() * X.size(axis)).sqrt()
    return X * (step * (norm / new_norm.clamp_min(1e-10)))


class MuonAdamW:
    """Muon and AdamW over one list of parameter groups, the attribute `param_groups`.

    groups: dicts with these keys:
        kind: "adamw" or "muon".
        params: list of the parameters; in a group of Muon they are matrices of one shape.
        lr, weight_decay: the rates of the next step. initial_lr: the learning rate before the schedule.
        betas, eps: in groups of AdamW only.
        momentum, beta2, initial_weight_decay (the weight decay before the schedule): in groups of Muon only.
    names: {parameter name: parameter}; `state_dict` uses these names.
    The attribute `compute_dtype`, if set, is the dtype of Muon's GEMMs; weights and state keep their dtype.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], names: Mapping[str, Parameter]) -> None:
        groups = list(groups)
        self._adamw_groups = [g for g in groups if g["kind"] == "adamw"]
        self._adamw_state: dict[Parameter, ParameterState] = {}
        self._muon_groups = [g for g in groups if g["kind"] == "muon"]
        self._muon_group_of = {p: g for g in self._muon_groups for p in g["params"]}
        self._muon_state: dict[Parameter, ParameterState] = {}
        self._rows: dict[Parameter, RowAdamW] = {}
        self._names = dict(names)
        self.compute_dtype: torch.dtype | None = None
        self.param_groups: list[dict[str, Any]] = [*self._adamw_groups, *self._muon_groups]

    def set_schedule(self, lr_multiplier: float, momentum: float, weight_decay_multiplier: float) -> None:
        """Set the rates of the next step from the values that `build_optimizer` has set.

        lr_multiplier: factor of the learning rate of each group. momentum: the momentum of Muon's groups.
        weight_decay_multiplier: factor of the weight decay of Muon's groups.
        """
        for group in self.param_groups:
            group["lr"] = group["initial_lr"] * lr_multiplier
        for group in self._muon_groups:
            group["momentum"] = momentum
            group["weight_decay"] = group["initial_weight_decay"] * weight_decay_multiplier

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        self.step_adamw()
        self.step_muon()

    @torch.no_grad()
    def step_adamw(self) -> None:
        """Update the parameters of AdamW that have a gradient, except those that are sharded by rows."""
        for group in self._adamw_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            if not stepped:
                continue
            for p in stepped:
                if p not in self._adamw_state:
                    self._adamw_state[p] = fresh_adamw_state(p)
            states = [self._adamw_state[p] for p in stepped]
            moments = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
            gradients = [p.grad for p in stepped if p.grad is not None]
            fused_adamw(group, list[Tensor](stepped), gradients, *moments)

    def shard_rows(self, p: Parameter, pieces: Sequence[slice]) -> None:
        """Shard AdamW's state of the parameter `p` by rows: this rank keeps the state of its own rows only.

        pieces: slices of the rows of `p`, which together are the own rows. `step_rows` updates these rows.
        Their state begins with zeros, and `state_dict` and `load_state_dict` have the state of these rows
        only.
        """
        [group] = [group for group in self._adamw_groups if any(p is each for each in group["params"])]
        group["params"] = [each for each in group["params"] if each is not p]
        self._adamw_state.pop(p, None)
        self._rows[p] = RowAdamW(p, group, pieces)

    def step_rows(self, p: Parameter, gradients: Tensor, active: Tensor | None = None) -> None:
        """Update the own rows of the parameter `p`, which an earlier call of `shard_rows` has set.

        gradients: (own rows, D), in the order of the own rows. If `active` is given, `gradients` is (n, D)
        and has only the rows that `active` lists; the gradients of the other own rows are 0. active: (n,),
        positions from 0 among the own rows, each once, ascending.
        """
        if active is None:
            self._rows[p].step(gradients)
        else:
            self._rows[p].step_active(active, gradients)

    @torch.no_grad()
    def step_muon(self, owned: Iterable[Parameter] | None = None) -> None:
        """Update the matrices in `owned`, by default all of Muon's; those without a gradient are skipped."""
        for p in self._muon_group_of if owned is None else owned:
            if p.grad is not None:
                p.sub_(self.muon_update(p))

    @torch.no_grad()
    def muon_update(self, p: Parameter) -> Tensor:
        """The update to subtract from matrix p, in p's shape; it includes learning rate and weight decay.

        Advances p's state, but does not change p or its gradient. Raises ValueError if p has no gradient.
        """
        if p.grad is None:
            raise ValueError("a Muon matrix was stepped without a gradient")
        group, state = self._muon_group_of[p], self.muon_state(p)
        rows, cols = p.shape
        state["momentum"].lerp_(p.grad, 1 - group["momentum"])
        G = p.grad.lerp(state["momentum"], group["momentum"])  # Nesterov: look ahead along the momentum
        X = reduce_variance(orthogonalize(G, self.compute_dtype), state["second_moment"], group["beta2"])
        lr = group["lr"] * max(1.0, rows / cols) ** 0.5
        cautious = X * p >= 0  # decay only where the update does not push the other way
        return lr * X + (lr * group["weight_decay"]) * p * cautious

    def muon_parameters(self) -> list[MuonMatrix]:
        """All matrices that Muon updates, in the order of the model, which is the same on every rank."""
        matrices = ((name, p) for name, p in self._names.items() if p in self._muon_group_of)
        return [MuonMatrix(name, p, polar_express_flops(*p.shape)) for name, p in matrices]

    def muon_state(self, p: Parameter) -> ParameterState:
        """The state of matrix p, not a copy: `momentum` (rows, cols), `second_moment` (rows, 1) or (1, cols).

        The tensors are zeros if this process has neither updated p nor loaded its state. The owner rank's
        state can be copied into them.
        """
        if p not in self._muon_state:
            self._muon_state[p] = self._fresh_state(p)
        return self._muon_state[p]

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter, by name, in the order of the model."""
        return {name: p.shape for name, p in self._names.items()}

    def state_dict(self) -> dict[str, ParameterState]:
        """The optimizer state that this process holds: {parameter name: {tensor name: tensor}}.

        Parameters without state are left out. The tensors are not copies. For AdamW they are step, a scalar,
        and exp_avg and exp_avg_sq, in the shape of the parameter or of its own rows. For Muon see
        `muon_state`. Rates are not included: they follow from the run's configuration and the step.
        """
        rows = {p: rows.state for p, rows in self._rows.items() if rows.state["step"]}
        state_of = self._adamw_state | self._muon_state | rows
        return {name: dict(state_of[p]) for name, p in self._names.items() if p in state_of}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Tensor]], assign: bool = False) -> None:
        """Replace the whole optimizer state by a copy of `state_dict`, which has the form of `state_dict()`.

        The number of ranks may differ from that of the ranks that trained. The state of a parameter that is
        missing in `state_dict` starts from zero: an owner rank needs only the state of its own matrices. For
        a parameter that is sharded by rows, `state_dict` has the state of this rank's own rows. assign: use
        its tensors instead of copies.
        Raises ValueError if `state_dict` has a parameter or a shape that this model does not have.
        """
        loaded: dict[Parameter, ParameterState] = {}
        for name, saved in state_dict.items():
            if name not in self._names:
                raise ValueError(f"the optimizer state holds {name}, which this model does not have")
            p = self._names[name]
            loaded[p] = self._fresh_state(p)
            if {key: t.shape for key, t in saved.items()} != {key: t.shape for key, t in loaded[p].items()}:
                raise ValueError(f"the optimizer state of {name} does not fit its shape {tuple(p.shape)}")
            if assign:
                loaded[p] = dict(saved)
                continue
            for key, tensor in loaded[p].items():
                tensor.copy_(saved[key])
        muon = self._muon_group_of
        for p, rows in self._rows.items():
            rows.state = loaded.pop(p) if p in loaded else rows.fresh_state()
        self._adamw_state = {p: state for p, state in loaded.items() if p not in muon}
        self._muon_state = {p: state for p, state in loaded.items() if p in muon}

    def _fresh_state(self, p: Parameter) -> ParameterState:
        """The state of p before its first step."""
        if p in self._muon_group_of:
            rows, cols = p.shape
            second_moment = p.new_zeros((rows, 1) if rows >= cols else (1, cols))
            return {"momentum": torch.zeros_like(p), "second_moment": second_moment}
        return self._rows[p].fresh_state() if p in self._rows else fresh_adamw_state(p)


def build_optimizer(
    model: nn.Module,
    unembedding_lr: float,
    embedding_lr: float,
    matrix_lr: float,
    scalar_lr: float,
    weight_decay: float,
) -> MuonAdamW:
    """Create the optimizer of a GPT.

    unembedding_lr: the learning rate of lm_head. embedding_lr: the base rate of the embeddings. matrix_lr,
    weight_decay: the rates of Muon. scalar_lr: the base rate of the per-layer scalars. The caller scales
    these rates for the batch size; this function scales those of embeddings and lm_head for the width of the
    model. Raises ValueError if `model` has a parameter that a GPT does not have.
    """
    names = dict(model.named_parameters())
    width = width_scale(names["transformer.wte.weight"].size(1))
    table = {  # start of a parameter's name: lr, betas, weight decay
        "lm_head.": (unembedding_lr * width, (0.8, 0.96), 0.01),
        "transformer.wte.": (embedding_lr * width, (0.8, 0.995), 0.001),
        "value_embeds.": (embedding_lr * width * 0.5, (0.8, 0.995), 0.01),
        "resid_lambdas": (scalar_lr * 0.01, (0.8, 0.95), 0.05),
        "x0_lambdas": (scalar_lr, (0.96, 0.95), 0.0),
        "smear_": (SMEAR_LR, (0.8, 0.95), 0.0),
        "backout_lambda": (SMEAR_LR, (0.8, 0.95), 0.0),
    }
    adamw: dict[str, list[Parameter]] = {start: [] for start in table}
    muon: dict[torch.Size, list[Parameter]] = defaultdict(list)
    for name, p in names.items():
        if name.startswith("transformer.h."):
            muon[p.shape].append(p)
            continue
        start = next((start for start in table if name.startswith(start)), None)
        if start is None:
            raise ValueError(f"no optimizer group is known for parameter {name}")
        adamw[start].append(p)

    groups: list[dict[str, Any]] = []
    for start, (lr, betas, decay) in table.items():
        rates = {"lr": lr, "initial_lr": lr, "betas": betas, "eps": ADAMW_EPS, "weight_decay": decay}
        groups.append({"kind": "adamw", "params": adamw[start], **rates})
    for shape in sorted(muon):
        rates = {"lr": matrix_lr, "initial_lr": matrix_lr, "momentum": 0.95, "beta2": 0.9}
        decays = {"weight_decay": weight_decay, "initial_weight_decay": weight_decay}
        groups.append({"kind": "muon", "params": muon[shape], **rates, **decays})
    return MuonAdamW(groups, names)
