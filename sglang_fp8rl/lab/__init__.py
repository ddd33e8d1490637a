"""What people look at, measure and try with: may use everything, nothing uses it.

Its dependencies are extras; the doctor, the plan and the export need none of them.
"""
