"""What real kernels do that the meta device does not show, one module for each side that differs.

engine  what the tracer's own presence changes in autograd, undone
cpu     what CPU kernels return and keep
    layout  how the results of pointwise kernels lie in memory
"""
