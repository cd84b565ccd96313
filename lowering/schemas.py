"""What onnxruntime's optimisers write into ai.onnx, where the standard does not have it: schemas for onnx's checker.

LayerNormalization came with opset 17, SimplifiedLayerNormalization not at all. Importing this module registers both
with onnx, once per process.
"""

from __future__ import annotations

from onnx import defs

_ANY_FLOAT = ["tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"]


def _register(name: str, inputs: str, outputs: str) -> None:
    """Names ending in ? are optional. The types of inputs and outputs may differ, as in onnxruntime."""
    parameter, option = defs.OpSchema.FormalParameter, defs.OpSchema.FormalParameterOption

    def parameters(names: str) -> list[defs.OpSchema.FormalParameter]:
        return [
            parameter(n.rstrip("?"), f"T{k}", param_option=option.Optional if n.endswith("?") else option.Single)
            for k, n in enumerate(names.split())
        ]

    kinds = {f"T{k}" for k in range(max(len(inputs.split()), len(outputs.split())))}
    schema = defs.OpSchema(
        name,
        "",
        1,
        inputs=parameters(inputs),
        outputs=parameters(outputs),
        type_constraints=[(kind, _ANY_FLOAT, "") for kind in sorted(kinds)],
        attributes=[
            defs.OpSchema.Attribute("axis", defs.OpSchema.AttrType.INT, "", required=False),
            defs.OpSchema.Attribute("epsilon", defs.OpSchema.AttrType.FLOAT, "", required=False),
            defs.OpSchema.Attribute("stash_type", defs.OpSchema.AttrType.INT, "", required=False),
        ],
    )
    defs.register_schema(schema)


_register("LayerNormalization", "X Scale B?", "Y Mean? InvStdDev?")
_register("SimplifiedLayerNormalization", "X scale", "Y inv_std_var?")
