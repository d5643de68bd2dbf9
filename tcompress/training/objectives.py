"""The terms that a loss can have, and what they observe during a forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from math import log
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, logsigmoid
from transformers import PreTrainedModel

from tcompress.attention.module import UnusedProjection
from tcompress.data.inputs import IGNORED
from tcompress.data.sentences import PLAIN, SentenceEncoder
from tcompress.errors import InputError
from tcompress.models import SourceModel
from tcompress.roles import Roles
from tcompress.roles.find import find_roles

Batch = dict[str, Tensor]

_PROJECTIONS = ("q", "k", "v")


@dataclass
class Observed:
    """Outputs of one forward pass."""

    output: Any = None  # what the model returned
    states: list[Tensor] = field(default_factory=list)  # of observed blocks: (examples, tokens, d)
    projections: dict[str, Tensor] = field(default_factory=dict)  # of the last of them by role
    vectors: Tensor | None = None  # embeddings of texts, in a space of their own: (texts, D)
    mapped: Tensor | None = None  # the same in the student's space: (texts, d)
    peers: tuple[Tensor, Tensor] | None = None  # student's and teacher's, of all texts of a step
    decodes: Sequence[bool] = ()  # whether each of the states is a decoder's, beside an encoder's

    @property
    def logits(self) -> Tensor | None:
        return self._returned("logits")

    @property
    def final(self) -> Tensor | None:
        """Hidden states as the model returns them, if it does."""
        return self._returned("last_hidden_state")

    def _returned(self, name: str) -> Tensor | None:
        value = getattr(self.output, name, None)
        return value if isinstance(value, Tensor) else None


class Observer:
    """A model whose runs show what (some) blocks compute, and the last one's `projections`."""

    def __init__(
        self, model: PreTrainedModel, roles: Roles, blocks: Sequence[int], projections: bool
    ) -> None:
        self.model, self.blocks = model, [block.name for block in roles.blocks]
        names = [roles.blocks[index].name for index in blocks]
        self.modules = [model.get_submodule(name) for name in names]
        both = bool(getattr(model.config, "is_encoder_decoder", False))
        self.decodes = [both and "decoder" in name for name in names]
        self.order: list[int] | None = None
        """For each label of the model that it teaches its own, if they are in another order."""
        self._outputs: Observed | None = None
        for module in self.modules:
            module.register_forward_hook(self._keep_state)
        for layer in roles.blocks[blocks[-1]].layers if projections else ():
            module = model.get_submodule(layer.name)
            sizes = {part.name: part.size for part in layer.parts}
            projects = layer.role in _PROJECTIONS or sizes.keys() & {*_PROJECTIONS}
            if projects and not isinstance(module, UnusedProjection):
                module.register_forward_hook(partial(self._keep_projection, sizes))

    def run(self, batch: Mapping[str, Tensor], runner: nn.Module | None = None) -> Observed:
        """Run the model, or a wrapper of it."""
        # Blocks that are computed again in the backward pass must not be observed again.
        outputs = self._outputs = Observed(decodes=self.decodes)
        try:
            outputs.output = (runner or self.model)(**batch)
        finally:
            self._outputs = None
        if self.order is not None:
            outputs.output.logits = outputs.output.logits[..., self.order]
        return outputs

    def _keep_state(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._outputs is not None:
            # What a block returns may be a tuple that starts with its state.
            self._outputs.states.append(output[0] if isinstance(output, tuple | list) else output)

    def _keep_projection(
        self, sizes: Mapping[str, int], module: nn.Module, args: Any, output: Tensor
    ) -> None:
        if self._outputs is not None:
            for role, piece in zip(sizes, output.split([*sizes.values()], -1), strict=True):
                if role in _PROJECTIONS:
                    self._outputs.projections[role] = piece


class TokenTeachers:
    """Several teachers that read the same tokens: the mean of their probabilities of the next."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers
        self.model = nn.ModuleList([observer.model for observer in observers])

    def run(self, batch: Mapping[str, Tensor]) -> Observed:
        """Run all of them; a single one as it is."""
        if len(self.observers) == 1:
            return self.observers[0].run(batch)
        scores = (observer.run(batch).logits for observer in self.observers)
        # Of models without a head, which have none, there is only one.
        logs = (logits.float().log_softmax(-1) for logits in scores if logits is not None)
        mean = reduce(torch.logaddexp, logs) - log(len(self.observers))
        return Observed(SimpleNamespace(logits=mean))


@contextmanager
def fed_with(modules: Sequence[nn.Module], states: Sequence[Tensor]) -> Iterator[None]:
    """Feed every block but the first the teacher's state, so that each is trained alone."""
    with ExitStack() as hooks:
        for module, state in zip(modules[1:], states, strict=False):
            feed = partial(_feed, state)
            hooks.enter_context(module.register_forward_pre_hook(feed, with_kwargs=True))
        yield


def _feed(state: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (state.to(args[0].dtype), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": state.to(kwargs["hidden_states"].dtype)}


@contextmanager
def predicted_at(model: PreTrainedModel, words: Tensor | None) -> Iterator[None]:
    """Predict words where they are hidden alone: all others cost most of a step.

    `words` are those to predict, `IGNORED` elsewhere (examples, tokens), or None for all of them.
    Logits of words are (hidden, vocabulary) then.
    """
    decoder = None if words is None else model.get_output_embeddings()
    if words is None or decoder is None:
        yield
        return
    hidden = words != IGNORED
    with decoder.register_forward_pre_hook(lambda _, args: (args[0][hidden],)):
        yield


def loaded_roles(source: SourceModel, model: PreTrainedModel) -> Roles:
    """Blocks and layers of a loaded model, converted or not, by their names when running."""
    kind: Any = type(model)
    return find_roles(replace(source, model_class=kind).meta_model())


_MASKS = ("attention_mask", "decoder_attention_mask")


def token_mask(batch: Mapping[str, Tensor], state: Tensor, *, decodes: bool = False) -> Tensor:
    """Mask of the rows of a state that count: padding does not.  # (examples, tokens).

    Two texts may have one length: `decodes` says that the state is of the decoder's.
    """
    for name in reversed(_MASKS) if decodes else _MASKS:
        mask = batch.get(name)
        if mask is not None and mask.shape == state.shape[:2]:
            return mask.bool()
    return torch.ones(state.shape[:2], dtype=torch.bool, device=state.device)


def embedded(sentences: SentenceEncoder, batch: Batch, outputs: Observed) -> Tensor:
    """One vector for each text.  # (texts, width)."""
    states = outputs.final if outputs.final is not None else outputs.states[-1]
    return sentences(states.float(), token_mask(batch, states))


def token_weights(batch: Mapping[str, Tensor], state: Tensor, *, decodes: bool = False) -> Tensor:
    """Weights of rows in a sum over tokens: without a mask, as for pictures, an example is one."""
    mask = token_mask(batch, state, decodes=decodes).to(state.dtype)
    return mask if any(name in batch for name in _MASKS) else mask / mask.shape[1]


Unit = Literal["examples", "tokens", "decoded", "targets"]
"""What a sum is divided by: `decoded` are tokens that a decoder reads, where there is one beside an
encoder, and else all tokens."""


@dataclass(frozen=True)
class Setting:
    """Settings that objectives may depend on."""

    temperature: float = 2.0  # softening of the teacher's logits
    per_token: bool = False  # whether logits are predictions of tokens, rather than of examples
    per_target: bool = False  # whether they are those of a text that the task has as its target
    independent: bool = False  # whether each logit is a yes or no of its own
    heads: int = 1  # of relations of attention
    causal: bool = False  # whether tokens see only those before them
    sentences: SentenceEncoder = PLAIN
    task: Callable[[Observed, Batch], Tensor] | None = None  # sum of its loss


class Objective(ABC):
    """One term of the loss: a sum over units, so that neither pieces nor processes change it."""

    name: ClassVar[str]
    needs_teacher: ClassVar[bool] = True
    needs_projections: ClassVar[bool] = False
    unit: Unit = "tokens"

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abstractmethod
    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        """Sum of the term over a batch; without a teacher what it computed is empty."""

    def sums(self, batch: Batch, student: Observed, teacher: Observed) -> dict[Unit, Tensor]:
        """Parts of the sum, by the units that each is of."""
        return {self.unit: self.loss(batch, student, teacher)}

    def prepare(self, passes: Iterable[tuple[Batch, Observed]]) -> None:  # noqa: B027 - optional
        """Look at the teacher on some batches before training begins."""


class TaskLoss(Objective):
    """The task's own loss, against labels."""

    name = "task"
    needs_teacher = False
    unit = "targets"

    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        assert self.setting.task is not None
        return self.setting.task(student, batch)


class Logits(Objective):
    """Divergence from the teacher's softened predictions (Hinton et al., arXiv:1503.02531).

    Heads with one output, such as those of cross-encoders, are imitated by the squared difference.
    """

    name = "logits"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        of_texts: Unit = "decoded" if setting.per_token else "examples"
        self.unit = "targets" if setting.per_target else of_texts

    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        if student.logits is None or teacher.logits is None:
            text = "the objective `logits` needs a model with a head"
            raise InputError(text, "leave it out of `objectives`")
        logits, taught = student.logits.float(), teacher.logits.float()
        if logits.shape[-1] == 1:  # a score: a distribution over one class says nothing
            return (logits - taught).square().sum()
        soft = self.setting.temperature
        logits, taught = logits / soft, taught / soft
        # The squared temperature lets the gradient keep its size.
        if self.setting.independent:
            return _binary_divergence(logits, taught).sum() * soft**2
        logs, taught = log_softmax(logits, -1), log_softmax(taught, -1)
        lost = kl_div(logs, taught, reduction="none", log_target=True).sum(-1) * soft**2
        if lost.ndim > 1:
            lost = lost * token_weights(batch, lost, decodes=True)
        return lost.sum()


def _binary_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Divergence of probabilities of yes and no from the teacher's, by logits."""
    parts = [
        logsigmoid(sign * teacher).exp() * (logsigmoid(sign * teacher) - logsigmoid(sign * student))
        for sign in (1, -1)
    ]
    return parts[0] + parts[1]


class Hidden(Objective):
    """Relative squared error of each block's output, a mean over blocks.

    It is relative token by token, which keeps tokens with huge activations from hiding all others.
    Those of a decoder's blocks are other ones, and more or fewer, than an encoder's.
    """

    name = "hidden"

    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        return torch.stack([*self.sums(batch, student, teacher).values()]).sum()

    def sums(self, batch: Batch, student: Observed, teacher: Observed) -> dict[Unit, Tensor]:
        """Sums over tokens, of blocks of an encoder and of a decoder, over the number of blocks."""
        decodes = student.decodes or [False] * len(student.states)
        compared = [*zip(student.states, teacher.states, decodes, strict=True)]
        if student.final is not None and teacher.final is not None:
            compared.append((student.final, teacher.final, any(decodes)))
        errors = defaultdict[Unit, list[Tensor]](list)
        for state, target, decoded in compared:
            error = self._relative_error(batch, state, target, decoded)
            errors["decoded" if decoded else "tokens"].append(error)
        return {
            unit: torch.stack(of_unit).sum() / len(compared) for unit, of_unit in errors.items()
        }

    def _relative_error(self, batch: Batch, state: Tensor, target: Tensor, decodes: bool) -> Tensor:
        state, target = state.float(), target.float()
        if state.ndim == 4:  # of convolutions, whose channels come first
            state, target = state.flatten(2).mT, target.flatten(2).mT
        error = (state - target).square().sum(-1) / target.square().sum(-1).clamp_min(1e-12)
        return (error * token_weights(batch, error, decodes=decodes)).sum()


ANCHORS = 256  # sentences whose teacher embeddings the others are compared with


class Embedding(Objective):
    """Distance of embeddings, and of similarities to anchors, so that batches do not matter."""

    name = "embedding"
    unit = "examples"
    anchors: Tensor | None = None

    def prepare(self, passes: Iterable[tuple[Batch, Observed]]) -> None:
        """Take the anchors from the first batches."""
        rows: list[Tensor] = []
        for batch, teacher in passes:
            rows.append(self._embed(batch, teacher))
            if sum(map(len, rows)) >= ANCHORS:
                break
        if rows:
            self.anchors = torch.cat(rows)[:ANCHORS]

    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        error = self._embed(batch, student) - self._embed(batch, teacher)
        lost = error.square().sum(-1)
        if self.anchors is not None:
            lost = lost + (error @ self.anchors.mT).square().mean(-1) * error.shape[-1]
        return lost.sum()

    def _embed(self, batch: Batch, outputs: Observed) -> Tensor:
        if outputs.mapped is not None:
            return outputs.mapped
        return embedded(self.setting.sentences, batch, outputs)


class Similarities(Objective):
    """Squared difference of the cosines of all texts of a step, in spaces of any width.

    Only the first text of a pair has a gradient. As cosines are symmetric, that is half of the
    whole gradient, and neither pieces nor processes change it: they need vectors of one another.
    """

    name = "similarities"
    unit = "examples"

    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        vectors, taught = self.vectors(batch, student, teacher)
        return self.between(vectors, taught, *(teacher.peers or (vectors.detach(), taught)))

    def vectors(self, batch: Batch, student: Observed, teacher: Observed) -> tuple[Tensor, Tensor]:
        """Embeddings of length 1 by both.  # (texts, d), (texts, D)."""
        taught = teacher.vectors
        if taught is None:
            taught = embedded(self.setting.sentences, batch, teacher)
        return embedded(self.setting.sentences, batch, student), taught

    def between(
        self, vectors: Tensor, taught: Tensor, peers: Tensor, taught_peers: Tensor
    ) -> Tensor:
        """Sum over texts of the mean over their peers, as large as that of `embedding`."""
        total = vectors.new_zeros(())
        for rows, taught_rows in zip(vectors.split(_ROWS), taught.split(_ROWS), strict=True):
            error = rows @ peers.mT - taught_rows @ taught_peers.mT
            total = total + error.square().mean(-1).sum()
        return total * vectors.shape[-1]


_ROWS = 1024  # texts whose cosines with all others are computed at once


class Attention(Objective):
    """Divergence of the last block's relations, as in MiniLMv2 (arXiv:2012.15828).

    Relations are softmaxed scaled products of queries, keys or values with themselves by head; the
    term is a mean. They are read off the projections: any implementation of attention will do.
    """

    name = "attention"
    needs_projections = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.unit = "decoded" if setting.causal else "tokens"

    def loss(self, batch: Batch, student: Observed, teacher: Observed) -> Tensor:
        kinds = [kind for kind in teacher.projections if kind in student.projections]
        if not kinds:
            raise InputError(
                "the objective `attention` needs queries, keys or values, and the last block has "
                "none",
                "leave it out of `objectives`",
            )
        pairs = [(student.projections[kind], teacher.projections[kind]) for kind in kinds]
        return torch.stack([self._divergence(batch, *pair) for pair in pairs]).mean()

    def _divergence(self, batch: Batch, student: Tensor, teacher: Tensor) -> Tensor:
        mask = token_mask(batch, student, decodes=self.setting.causal)
        visible = mask[:, None, None, :]
        if self.setting.causal:
            visible = visible & torch.ones_like(mask[0]).expand(mask.shape[1], -1).tril()
        logs, taught = (self._relations(rows, visible) for rows in (student, teacher))
        lost = kl_div(logs, taught, reduction="none", log_target=True)
        lost = lost.masked_fill(~visible, 0.0).sum(-1).mean(1)
        return (lost * token_weights(batch, lost, decodes=self.setting.causal)).sum()

    def _relations(self, rows: Tensor, visible: Tensor) -> Tensor:
        heads = self.setting.heads if rows.shape[-1] % self.setting.heads == 0 else 1
        split = rows.float().unflatten(-1, (heads, -1)).transpose(1, 2)
        scores = split @ split.mT / split.shape[-1] ** 0.5
        # A finite floor: rows of padding would give NaN, whose gradient no mask takes away.
        return log_softmax(scores.masked_fill(~visible, -1e4), -1)


OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind for kind in (TaskLoss, Logits, Hidden, Embedding, Similarities, Attention)
}
"""All objectives by name."""
