"""What a backend module offers, stated once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    # A worker reads the table of backends before it limits NumPy's threads, so nothing here may import NumPy.
    from numpy.typing import NDArray

Tensor: TypeAlias = Any
"""A framework's own array. Opaque outside its module."""

Stages: TypeAlias = dict[str, Tensor]
"""Named intermediates, in the order in which they are computed."""


class Backend(Protocol):
    """One framework's attention, as that framework's users would write it.

    Every operation keeps the dtype of its inputs. A row in which no key may be attended (every score is -inf) has
    weights of zero and a log_sum_exp of -inf. An option that a backend cannot express raises ``NotImplementedError``.
    """

    def prepare(self, dtype: str, threads: int) -> None:
        """Configure the framework for this process, before anything is computed."""

    def describe(self) -> dict[str, str]:
        """Version, device and switches of the framework that may change its numbers."""

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        """Turn a NumPy array into the framework's own, dtype and shape kept."""

    def to_numpy(self, tensor: Tensor) -> NDArray[Any]:
        """Turn the framework's array into NumPy's, dtype and shape kept."""

    def dot_scores(self, query: Tensor, key: Tensor, *, scale: float | None = None) -> Stages:
        """Score by scaled dot product: q k^T, times ``scale`` (1/sqrt(D) when None).

        query (B, H, Lq, D), key (B, H, Lk, D) -> raw_scores, scores (B, H, Lq, Lk).
        Vaswani et al. 2017, section 3.2.1; with scale 1, Luong et al. 2015, section 3.1, "dot".
        """

    def general_scores(self, query: Tensor, key: Tensor, weight: Tensor) -> Stages:
        """Score by a bilinear form: q W k^T.

        query (B, H, Lq, D), key (B, H, Lk, Dk), weight (D, Dk) -> scores (B, H, Lq, Lk).
        Luong et al. 2015, section 3.1, "general".
        """

    def additive_scores(
        self,
        query: Tensor,
        key: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        score_vector: Tensor,
        *,
        score_bias: Tensor | None = None,
    ) -> Stages:
        """Score by a small feed-forward network: tanh(q Wq + k Wk + b) . v.

        query (B, H, Lq, D), key (B, H, Lk, Dk), query_weight (D, A), key_weight (Dk, A), score_vector (A,),
        score_bias (A,) -> scores (B, H, Lq, Lk). Bahdanau et al. 2015, appendix A.1.2.
        """

    def mask_scores(
        self, scores: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None, is_causal: bool = False
    ) -> Stages:
        """Add ``bias``, then set to -inf what ``mask`` or causality forbids; stages that nothing asks for are left out.

        scores (B, H, Lq, Lk); mask, boolean, True = may attend, and bias broadcast to it
        -> biased, masked (B, H, Lq, Lk).
        Causal means key j may be attended by query i iff j <= i (aligned top left).
        """

    def softmax(self, scores: Tensor) -> Stages:
        """Normalise each row over the keys.

        scores (B, H, Lq, Lk) -> weights (B, H, Lq, Lk), log_sum_exp (B, H, Lq).
        """

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Stages:
        """Score, mask, normalise and average the values.

        query (B, H, Lq, D), key (B, H, Lk, D), value (B, H, Lk, Dv)
        -> the stages of ``dot_scores``, ``mask_scores`` and ``softmax``, then output (B, H, Lq, Dv).
        """

    def multi_head_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        heads: int,
        query_weight: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        output_weight: Tensor | None = None,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        output_bias: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Stages:
        """Project, attend in every head, merge the heads and project once more.

        query (B, Lq, E), key (B, Lk, Ek), value (B, Lk, Ev), query_weight (E, H*D), key_weight (Ek, H*D),
        value_weight (Ev, H*Dv), output_weight (H*Dv, Eo); without output_weight the merged heads are the output,
        and an output_bias is refused
        -> query, key, value (B, H, L, D), the stages of ``attention``, context (B, H, Lq, Dv), output (B, Lq, Eo).
        Vaswani et al. 2017, section 3.2.2.
        """
