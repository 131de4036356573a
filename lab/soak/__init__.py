"""Programs that kill, damage, overload and fuzz blendrag for hours; run from the root of a checkout.

They use the helpers of ``tests/``, and the tests run the same code at small counts. Each module names its
make target.
"""
