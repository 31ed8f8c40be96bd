// Ops that few families need (rare.h).
#include "../../rare.h"

#include <algorithm>

#include "../include/device.cuh"
#include "program.h"

namespace pk {
namespace {

int64_t elements(const pk_tensor &t) { return t.stride / (t.format == PK_F32 ? 4 : 2); }

struct SoftplusArguments {
    const void *x, *g;
    void *out;
    const StepInfo *info;
    int64_t x_stride, g_stride, out_stride, rows_symbol;
    int32_t x_format, g_format, out_format, cols, share;
};

// out = x * log(1 + exp(g)). Grid: columns, rows.
__global__ void softplus_kernel(const __grid_constant__ SoftplusArguments a) {
    wait_dependence();
    release_dependents();
    const int row = blockIdx.y;
    if (row >= rows_of(a.info, a.rows_symbol)) return;
    for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < a.cols; k += gridDim.x * blockDim.x) {
        const float g = load_as_f32(a.g, row * a.g_stride + k / a.share, a.g_format), factor = g > 20.0f ? g : log1pf(expf(g));
        store_from_f32(a.out, row * a.out_stride + k, a.out_format, load_as_f32(a.x, row * a.x_stride + k, a.x_format) * factor);
    }
}

int32_t launch_softplus(const Launch &l, const pk_op_softplus &op) {
    SoftplusArguments a = {};
    a.x = reinterpret_cast<const void *>(op.x.data);
    a.g = reinterpret_cast<const void *>(op.g.data);
    a.out = reinterpret_cast<void *>(op.out.data);
    a.info = l.info;
    a.x_stride = elements(op.x);
    a.g_stride = elements(op.g);
    a.out_stride = elements(op.out);
    a.rows_symbol = op.x.rows;
    a.x_format = op.x.format;
    a.g_format = op.g.format;
    a.out_format = op.out.format;
    a.cols = static_cast<int32_t>(op.x.cols);
    a.share = static_cast<int32_t>(op.x.cols / op.g.cols);
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>((op.x.cols + 255) / 256, 64)), static_cast<unsigned>(bound(l, op.x.rows)));
    return launch(l, "softplus", softplus_kernel, grid, dim3(256), 0, a);
}

}  // namespace

bool has_rare_op(int32_t op) { return op == PK_OP_SOFTPLUS; }

int32_t launch_rare(const Launch &l, const Record &record) {
    switch (record.op) {
        case PK_OP_SOFTPLUS: return launch_softplus(l, record.as<pk_op_softplus>());
        default: return fail(PK_UNSUPPORTED, "%s: the CUDA pack has no kernel for this op", op_name(record.op));
    }
}

}  // namespace pk
