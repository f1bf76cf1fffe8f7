"""What training the decoder takes, from its sizes alone: parameters, operations, memory. No torch.

Axis legend: B samples and T tokens of a forward pass, N = B T, C width, H and Hkv query and value heads,
D head size, M width of the MLP, V vocabulary, L layers. Memory is that of weights kept in float32 and
products in bfloat16 (autocast) or float32; the parts were read off the saved tensors of the model and are
held to its measured peak by a test.
"""

from dataclasses import dataclass
from typing import Any

MASTER = 4  # bytes of a weight, a gradient, or one of AdamW's two moments
LOSS_BLOCK = 64 * 2**20  # bytes of a block of logits (xsa_core.loss.BLOCK_BYTES)
EXACT = 4  # bytes of a number in norms, the residual stream and the softmax of the loss
STRIP = 2 * 2**20  # bytes of the softmax's strip on a CPU (xsa_core.loss.STRIP_BYTES)
VOCABULARIES = {"embedded": 256, "file": 256}  # bytes
GPT2_VOCABULARY = 50257
EXCLUSIVE = ("xsa", "xsa_learned", "random_direction", "mean_direction")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder and of its samples."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    length: int
    tied: bool
    post_embedding_norm: bool
    exclusive: bool
    extra: int = 0  # parameters beside matrices, norms and embeddings: biases, sinks, gains, strengths

    @property
    def inner(self) -> int:
        """H D, the width of all heads."""
        return self.heads * self.head_dim

    @property
    def inner_kv(self) -> int:
        """Hkv D."""
        return self.kv_heads * self.head_dim

    @property
    def block_matrices(self) -> int:
        """Parameters of the matrices of one block."""
        return self.width * (2 * self.inner + 2 * self.inner_kv + 2 * self.mlp)

    @property
    def embedding(self) -> int:
        """Parameters of one embedding."""
        return self.vocabulary * self.width

    @property
    def non_embedding(self) -> int:
        """Parameters outside input and output embedding."""
        norms = self.width * (2 * self.layers + 1 + self.post_embedding_norm)
        return self.layers * self.block_matrices + norms + self.extra

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.non_embedding + self.embedding * (1 if self.tied else 2)


def sizes_of(config: Any, vocabulary: int) -> Sizes:
    """Return the sizes of a run's decoder. `config` is a resolved run config of task text."""
    model = config.model
    heads = model.n_heads
    kv_heads = model.n_kv_heads or heads
    head_dim = model.head_dim or model.d_model // heads
    mlp = round(model.d_model * model.mlp_ratio)
    extra = model.n_sinks * 2 * kv_heads * head_dim + (2 * head_dim if model.qk_norm else 0)
    if model.bias:
        extra += (heads + 2 * kv_heads) * head_dim + model.d_model + mlp + model.d_model
    extra *= model.n_layers
    if model.bias:  # of the norms
        extra += model.d_model * (2 * model.n_layers + 1 + model.post_embedding_norm)
    return Sizes(
        layers=model.n_layers,
        width=model.d_model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        vocabulary=vocabulary,
        length=config.data.seq_len,
        tied=model.tie_embeddings,
        post_embedding_norm=model.post_embedding_norm,
        exclusive=config.attention.variant in EXCLUSIVE,
        extra=extra,
    )


def vocabulary_of(config: Any) -> int:
    """Return the vocabulary of a run's data: bytes, or GPT-2's where it has shards of tokens."""
    return VOCABULARIES.get(config.data.source, GPT2_VOCABULARY)


def flops_per_token(sizes: Sizes) -> tuple[float, float]:
    """Return the operations of training on one token: of the matrices, and of causal attention.

    A multiplication and an addition are two. The backward counts twice the forward; what a kernel computes
    again in it does not count (model FLOPs, PaLM, arXiv:2204.02311, appendix B, here with the causal half).
    """
    matrices = 2 * (sizes.layers * sizes.block_matrices + sizes.embedding)
    seen = (sizes.length + 1) / 2  # tokens that a token attends, on average
    attention = sizes.layers * 2 * 2 * sizes.inner * seen  # logits and weighted values
    return 3.0 * matrices, 3.0 * attention


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the moment of the peak. `casts` are the weights in bfloat16."""

    moment: str
    weights: float
    casts: float
    optimizer: float
    gradients: float
    activations: float
    logits: float
    working: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return (
            self.weights
            + self.casts
            + self.optimizer
            + self.gradients
            + self.activations
            + self.logits
            + self.working
        )


def block_activations(sizes: Sizes, tokens: int, product: int) -> float:
    """Return what one block keeps for its backward. `product`: bytes of a number of the matrix products."""
    projected = sizes.inner + 2 * sizes.inner_kv
    numbers = (
        2 * sizes.width  # inputs of the two first projections
        + projected  # queries, keys and values, of which the values are used as they are
        + sizes.inner + sizes.inner_kv  # rotated queries and keys
        + sizes.inner  # output of attention, already without the own value
        + 2 * sizes.mlp  # before and after GELU
    )  # fmt: skip
    scalars = 4 + sizes.heads * (2 if sizes.exclusive else 1)  # of norms; log-sum-exp and the removed part
    return tokens * (product * numbers + EXACT * (2 * sizes.width + scalars))


def block_working(sizes: Sizes, tokens: int, product: int) -> float:
    """Return what the backward of the last block adds to all activations at its peak.

    It starts in the MLP, where the output of GELU has gone when the gradient before it is formed; once it
    reaches attention, all that the MLP kept has gone.
    """
    residual = (EXACT + product) * sizes.width  # its gradient, and that in the products' type
    mlp = product * sizes.mlp
    freed = 2 * product * sizes.mlp + (EXACT + product) * sizes.width
    attention = product * (5 * sizes.inner + 5 * sizes.inner_kv) - freed
    return tokens * (residual + max(mlp, attention))


def peak_memory(
    sizes: Sizes,
    batch: int,
    *,
    product: int,
    accumulates: bool,
    shards: int = 1,
    buckets: bool = False,
    muon: bool = False,
    strip: int | None = None,
) -> Memory:
    """Return the memory at the moment of the peak on one device.

    Args:
        sizes: of model and samples.
        batch: B, samples of one forward pass.
        product: bytes of a number of the matrix products, 2 or 4.
        accumulates: several forward passes make one update, so gradients are there from the start.
        shards: devices over which weights, gradients and optimizer are spread (FSDP); each block is then
            gathered when it is used, and so are the embeddings, for the whole pass.
        buckets: gradients have a second copy for their exchange (DDP).
        muon: the matrices of the blocks have one moment instead of AdamW's two.
        strip: bytes of the softmax's strip on a CPU; None for a GPU, where it takes the whole block.
    """
    tokens = batch * sizes.length
    everything = sizes.parameters
    blocks = sizes.layers * sizes.block_matrices
    cast = product if product < MASTER else 0
    casts = cast * blocks
    if shards > 1:  # the block at work and the next one, and what lies outside the blocks
        casts = product * (2 * sizes.block_matrices + everything - blocks)
    moments_kept = 2 * everything - (blocks if muon else 0)
    one_embedding = MASTER * sizes.embedding
    all_gradients = MASTER * everything / shards
    exchange = MASTER * everything if buckets else 0.0
    start = all_gradients if accumulates else 0.0
    one_block = MASTER * sizes.block_matrices if shards > 1 else 0  # before it is scattered
    kept = sizes.layers * block_activations(sizes, tokens, product)
    kept += tokens * (EXACT * sizes.width * (1 + sizes.post_embedding_norm) + 16)
    repeated = one_embedding if sizes.tied or accumulates else 0  # added to a gradient that is there

    def moment(name: str, gradients: float, activations: float, logits: float, working: float) -> Memory:
        return Memory(
            moment=name,
            weights=MASTER * everything / shards,
            casts=0.0 if name == "end of the backward" and shards == 1 else casts,
            optimizer=MASTER * moments_kept / shards,
            gradients=gradients + exchange,
            activations=activations,
            logits=logits,
            working=working,
        )

    input_gradient = tokens * product * sizes.width
    moments = [
        moment(
            "loss",
            start,
            kept,
            loss_memory(sizes, tokens, product, strip),
            tokens * (EXACT + cast) * sizes.width,
        ),
        moment("start of the backward", start, kept, input_gradient + 2 * one_embedding, 0.0),
        moment(
            "first block of the backward",
            max(start, one_embedding / shards) + one_block,
            kept,
            0.0,
            block_working(sizes, tokens, product),
        ),
        moment("end of the backward", all_gradients + repeated, tokens * EXACT * sizes.width, 0.0, 0.0),
    ]
    return max(moments, key=lambda memory: memory.total)


def loss_memory(sizes: Sizes, tokens: int, product: int, strip: int | None) -> float:
    """Return what the loss holds at its peak: a block of logits, its softmax, both gradients."""
    rows = min(tokens, max(1, LOSS_BLOCK // (sizes.vocabulary * product)))
    block = rows * sizes.vocabulary
    softmax = EXACT * block if strip is None else min(EXACT * block, strip)
    cast = product * sizes.embedding if product < EXACT else 0  # the head, or its gradient, in bfloat16
    gradient = MASTER * sizes.embedding
    beside = max(softmax, gradient + cast)  # the first block makes the gradient after its softmax
    if rows < tokens:
        beside = gradient + max(softmax, cast)
    return tokens * product * sizes.width + product * block + cast + beside
