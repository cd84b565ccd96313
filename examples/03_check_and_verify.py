"""What a user asks before shipping: can every node be lowered, and are the numbers right?"""

from __future__ import annotations

import onnx

import lowering

GOOD = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["" : 24]>
good (float[B, 6, 32] x) => (float[B, 6, 32] y) {
  h = Swish (x)
  y = Attention <q_num_heads = 4, kv_num_heads = 4, softcap = 20.0> (h, x, x)
}
""")

BAD = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["" : 24, "com.example" : 1]>
bad (float[B, 6, 32] x) => (float[B, 6, 32] y, float[B, 6, 32] h) {
  [mystery] h = com.example.Frobnicate (x)
  [attend] y = Attention <q_num_heads = 5, kv_num_heads = 5> (x, x, x)
}
""")


def main() -> None:
    report = lowering.check(BAD)
    assert not report.ok
    for finding in report.findings:
        print(f"{finding.where}\n  {finding.what} {finding.remedy}")

    assert lowering.check(GOOD).ok
    result = lowering.verify(GOOD, sizes={"B": 3})
    for comparison in result.comparisons:
        print(f"{comparison.name}: max abs {comparison.max_abs:.1e}, max rel {comparison.max_rel:.1e}")
    assert result.first_difference is None


if __name__ == "__main__":
    main()
