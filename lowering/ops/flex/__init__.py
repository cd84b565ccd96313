"""FlexAttention of the domain lowering.flex: attention whose score and mask are expressions.

`lowering.flex` traces the expressions from Python functions, and writes models of one such node. The expressions are
those of `lowering.attention.expr`, as JSON.
"""
