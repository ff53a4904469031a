"""Layouts of trainings whose traces are drawn."""

from hypothesis import strategies as st

from tests.helpers.r3_traces import Layout


@st.composite
def layouts(draw: st.DrawFn, *, queue: bool | None = None) -> Layout:
    """Any layout of up to 16 ranks."""
    context = draw(st.sampled_from([1, 1, 2, 4]))
    tensor = draw(st.sampled_from([1, 2])) if context < 4 else 1
    packed = context > 1 or draw(st.booleans())
    sequence = tensor > 1 and draw(st.booleans())
    pipeline = draw(st.sampled_from([1, 2]))
    total = draw(st.integers(pipeline + 1, 6))
    dense = draw(st.integers(0, total - pipeline))
    return Layout(
        tensor=tensor,
        context=context,
        data=draw(st.sampled_from([1, 2])),
        pipeline=pipeline,
        sequence=sequence,
        packed=packed,
        layers=tuple(range(dense + 1, total + 1)),
        total_layers=total,
        full=draw(st.booleans()),
        lengths=tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))),
        microbatch=draw(st.integers(1, 3)),
        apart=draw(st.booleans()),
        steps=draw(st.integers(1, 2)),
        stages=draw(st.sampled_from([("prev-logprob", "train"), ("train",)])),
        queue=draw(st.booleans()) if queue is None else queue,
        data_slowest=draw(st.booleans()),
        fallback=draw(st.integers(0, 2)),
        recompute=draw(st.booleans()),
        previewed=draw(st.integers(0, 5)),
        capped=draw(st.integers(1, 3)),
        top_k=draw(st.sampled_from([1, 2, 4])),
        experts=draw(st.sampled_from([8, 64, 128])),
    )
