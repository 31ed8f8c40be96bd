// The small ops: norm, gate, gather, copy, add. Operands F32 or BF16 (copy: also F16, FP8).
#include <algorithm>

#include "../include/device.cuh"
#include "../include/invariant.h"
#include "../include/narrow.cuh"
#include "../include/operand.h"

namespace pk {
namespace {

constexpr int kNarrowingMost = 8192;  // elements of a row whose norm leaves them narrowed, too

struct NormArguments {
    Operand x, residual, out;
    const float *w, *post_w, *bias;
    const StepInfo *info;
    int64_t rows_symbol;
    int32_t cols, is_layer;
    float eps, residual_scale;
    Narrowed narrowed;  // of out, too
};

// v = x; v = v / rms(v) * post_w; residual = v = residual + v * residual_scale; out = v / rms(v) * w. A block per row, the
// row in registers: kMost elements a thread, at most kThreads of them. Grid: rows.
template <int kMost, int kThreads>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ NormArguments a) {
    __shared__ float shared[33];
    wait_dependence();
    release_dependents();
    const int row = blockIdx.x;
    if (row >= rows_of(a.info, a.rows_symbol)) return;
    const bool wide = (a.cols & 7) == 0 && (a.x.stride & 7) == 0 && (a.residual.stride & 7) == 0 && (a.out.stride & 7) == 0 &&
                      ((reinterpret_cast<uintptr_t>(a.x.p) | reinterpret_cast<uintptr_t>(a.residual.p) | reinterpret_cast<uintptr_t>(a.out.p)) & 15) == 0;
    float v[kMost / 8][8];
    auto each = [&](auto &&call) {
#pragma unroll
        for (int j = 0; j < kMost / 8; ++j) {
            int k = (j * blockDim.x + threadIdx.x) * 8;
            if (k < a.cols) call(v[j], k);
        }
    };
    auto read = [&](const Operand &o, int k, float(&f)[8]) {
        if (wide) {
            load8(o.p, row * o.stride + k, o.format, f);
        } else {
            for (int i = 0; i < 8; ++i) f[i] = k + i < a.cols ? load_as_f32(o.p, row * o.stride + k + i, o.format) : 0.0f;
        }
    };
    auto write = [&](const Operand &o, int k, const float(&f)[8]) {
        if (wide) {
            store8(o.p, row * o.stride + k, o.format, f);
        } else {
            for (int i = 0; i < 8; ++i)
                if (k + i < a.cols) store_from_f32(o.p, row * o.stride + k + i, o.format, f[i]);
        }
    };
    auto rms = [&] {
        float s = 0.0f;
        each([&](float(&f)[8], int) {
#pragma unroll
            for (int i = 0; i < 8; ++i) s += f[i] * f[i];
        });
        return rsqrtf(block_sum(s, shared) / a.cols + a.eps);
    };
    auto weighted = [&](const float *w, int k, float r, float(&f)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i] = f[i] * r * (wide || k + i < a.cols ? w[k + i] : 0.0f);
    };
    each([&](float(&f)[8], int k) { read(a.x, k, f); });
    if (a.post_w != nullptr) {
        const float r = rms();
        each([&](float(&f)[8], int k) { weighted(a.post_w, k, r, f); });
    }
    if (a.residual.p != nullptr) {
        each([&](float(&f)[8], int k) {
            float old[8];
            read(a.residual, k, old);
#pragma unroll
            for (int i = 0; i < 8; ++i) f[i] = old[i] + f[i] * a.residual_scale;
            write(a.residual, k, f);
        });
    }
    if (a.out.p != nullptr) {
        if (a.is_layer) {
            float s = 0.0f;
            each([&](float(&f)[8], int k) {
                for (int i = 0; i < 8; ++i) s += k + i < a.cols ? f[i] : 0.0f;
            });
            const float mean = block_sum(s, shared) / a.cols;
            each([&](float(&f)[8], int k) {
                for (int i = 0; i < 8; ++i) f[i] = k + i < a.cols ? f[i] - mean : 0.0f;
            });
            __syncthreads();
        }
        const float r = rms();
        each([&](float(&f)[8], int k) {
            weighted(a.w, k, r, f);
            if (a.bias != nullptr)
                for (int i = 0; i < 8; ++i) f[i] += k + i < a.cols ? a.bias[k + i] : 0.0f;
            if (!a.narrowed.is_all) write(a.out, k, f);
            if constexpr (kMost * kThreads > kNarrowingMost) return;
            if (a.narrowed.x != nullptr) narrow8(a.narrowed, row, k, f);
        });
    }
}

constexpr int kRowThreads = 512, kRowEights = 2;

// out = x / rms(x) * w of many rows: a block keeps the weight and has its next row on the way. Grid: any number of blocks. Rows of eights.
__global__ void __launch_bounds__(kRowThreads) norm_rows_kernel(const __grid_constant__ NormArguments a) {
    __shared__ float parts[2][kRowThreads / 32];
    const int n_warps = blockDim.x >> 5;
    float v[kRowEights][8], coming[kRowEights][8], w[kRowEights][8];
    auto each = [&](auto &&call) {
#pragma unroll
        for (int j = 0; j < kRowEights; ++j) {
            const int k = (j * blockDim.x + threadIdx.x) * 8;
            if (k < a.cols) call(j, k);
        }
    };
    each([&](int j, int k) { load8(a.w, k, PK_F32, w[j]); });
    wait_dependence();
    release_dependents();
    const int n_rows = rows_of(a.info, a.rows_symbol), first = blockIdx.x;
    if (first >= n_rows) return;
    each([&](int j, int k) { load8(a.x.p, first * a.x.stride + k, a.x.format, coming[j]); });
    int turn = 0;
    for (int row = first; row < n_rows; row += gridDim.x, turn ^= 1) {
        float squares = 0.0f;
        each([&](int j, int) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[j][i] = coming[j][i];
                squares += v[j][i] * v[j][i];
            }
        });
        const int next = row + gridDim.x;
        if (next < n_rows) each([&](int j, int k) { load8(a.x.p, next * a.x.stride + k, a.x.format, coming[j]); });
        squares = warp_sum(squares);
        if ((threadIdx.x & 31) == 0) parts[turn][threadIdx.x >> 5] = squares;
        __syncthreads();
        squares = 0.0f;
        for (int i = 0; i < n_warps; ++i) squares += parts[turn][i];
        const float r = rsqrtf(squares / a.cols + a.eps);
        each([&](int j, int k) {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[j][i] = v[j][i] * r * w[j][i];
            if (!a.narrowed.is_all) store8(a.out.p, row * a.out.stride + k, a.out.format, v[j]);
            if (a.narrowed.x != nullptr) narrow8(a.narrowed, row, k, v[j]);
        });
    }
}

struct MapArguments {
    Operand x, y, out;
    const StepInfo *info;
    const int32_t *sample_at, *sample_row, *row_start;
    int64_t rows_symbol;
    int32_t cols, act, is_gated, is_wide;  // is_wide: eight neighbours of every operand are one or two loads of 16 bytes
    float scale;
    Narrowed narrowed;  // of a sigmoid's out, too
};

// Every run of eight columns of a row that this thread owns.
template <class Each>
__device__ __forceinline__ void each_eight(const MapArguments &a, const Each &each) {
    for (int k = (blockIdx.x * blockDim.x + threadIdx.x) * 8; k < a.cols; k += gridDim.x * blockDim.x * 8) each(k);
}

// out = act(x[:, 0:F]) * x[:, F:2F], or act(x)
__global__ void gate_kernel(const __grid_constant__ MapArguments a) {
    wait_dependence();
    release_dependents();
    const int row = blockIdx.y;
    if (row >= rows_of(a.info, a.rows_symbol)) return;
    if (a.is_wide) {
        each_eight(a, [&](int k) {
            float g[8], u[8];
            load8(a.x.p, row * a.x.stride + k, a.x.format, g);
            if (a.is_gated) load8(a.x.p, row * a.x.stride + a.cols + k, a.x.format, u);
#pragma unroll
            for (int i = 0; i < 8; ++i) g[i] = activate(g[i], a.act) * (a.is_gated ? u[i] : 1.0f);
            store8(a.out.p, row * a.out.stride + k, a.out.format, g);
        });
        return;
    }
    for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < a.cols; k += gridDim.x * blockDim.x) {
        float g = load_as_f32(a.x.p, row * a.x.stride + k, a.x.format), u = a.is_gated ? load_as_f32(a.x.p, row * a.x.stride + a.cols + k, a.x.format) : 1.0f;
        store_from_f32(a.out.p, row * a.out.stride + k, a.out.format, activate(g, a.act) * u);
    }
}

// out[s] = x[the token that s is drawn after], or its row's first one, or the mean of all (act: pk_pool)
__global__ void gather_kernel(const __grid_constant__ MapArguments a) {
    wait_dependence();
    release_dependents();
    const int s = blockIdx.y;
    if (s >= rows_of(a.info, a.rows_symbol)) return;
    const bool is_last = a.act == PK_POOL_LAST;
    const int64_t first = is_last ? 0 : a.row_start[a.sample_row[s]], last = is_last ? a.sample_at[s] : a.row_start[a.sample_row[s] + 1] - 1;
    const int64_t begin = is_last ? last : first, end = a.act == PK_POOL_FIRST ? first : last;
    for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < a.cols; k += gridDim.x * blockDim.x) {
        float sum = 0.0f;
        for (int64_t t = begin; t <= end; ++t) sum += load_as_f32(a.x.p, t * a.x.stride + k, a.x.format);
        store_from_f32(a.out.p, s * a.out.stride + k, a.out.format, sum / (end + 1 - begin));
    }
}

// out = x * scale + y (y may be absent)
__global__ void add_kernel(const __grid_constant__ MapArguments a) {
    wait_dependence();
    release_dependents();
    const int row = blockIdx.y;
    if (row >= rows_of(a.info, a.rows_symbol)) return;
    if (a.is_wide) {
        each_eight(a, [&](int k) {
            float x[8], y[8] = {};
            load8(a.x.p, row * a.x.stride + k, a.x.format, x);
            if (a.y.p != nullptr) load8(a.y.p, row * a.y.stride + k, a.y.format, y);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = fmaf(x[i], a.scale, y[i]);
            store8(a.out.p, row * a.out.stride + k, a.out.format, x);
        });
        return;
    }
    for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < a.cols; k += gridDim.x * blockDim.x) {
        float v = load_as_f32(a.x.p, row * a.x.stride + k, a.x.format) * a.scale;
        if (a.y.p != nullptr) v += load_as_f32(a.y.p, row * a.y.stride + k, a.y.format);
        store_from_f32(a.out.p, row * a.out.stride + k, a.out.format, v);
    }
}

// out = x * sigmoid(g); g has the columns of x, or one
__global__ void sigmoid_kernel(const __grid_constant__ MapArguments a) {
    wait_dependence();
    release_dependents();
    const int row = blockIdx.y;
    if (row >= rows_of(a.info, a.rows_symbol)) return;
    if (a.is_wide) {
        const float one = a.act ? 0.0f : load_as_f32(a.y.p, row * a.y.stride, a.y.format);
        each_eight(a, [&](int k) {
            float x[8], g[8];
            load8(a.x.p, row * a.x.stride + k, a.x.format, x);
            if (a.act) load8(a.y.p, row * a.y.stride + k, a.y.format, g);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] /= 1.0f + __expf(-(a.act ? g[i] : one));
            if (!a.narrowed.is_all) store8(a.out.p, row * a.out.stride + k, a.out.format, x);
            if (a.narrowed.x != nullptr) narrow8(a.narrowed, row, k, x);
        });
        return;
    }
    for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < a.cols; k += gridDim.x * blockDim.x) {
        const float g = load_as_f32(a.y.p, row * a.y.stride + (a.act ? k : 0), a.y.format);
        store_from_f32(a.out.p, row * a.out.stride + k, a.out.format, load_as_f32(a.x.p, row * a.x.stride + k, a.x.format) / (1.0f + __expf(-g)));
    }
}

// out = x where both have the same format: bytes, whatever they mean
__global__ void copy_kernel(const __grid_constant__ MapArguments a, int64_t x_stride, int64_t out_stride, int64_t row_bytes) {
    wait_dependence();
    release_dependents();
    const int row = blockIdx.y;
    if (row >= rows_of(a.info, a.rows_symbol)) return;
    const uint8_t *x = static_cast<const uint8_t *>(a.x.p) + row * x_stride;
    uint8_t *out = static_cast<uint8_t *>(a.out.p) + row * out_stride;
    for (int64_t k = blockIdx.x * blockDim.x + threadIdx.x; k < row_bytes; k += gridDim.x * blockDim.x) out[k] = x[k];
}

// Whether eight neighbours of an operand may be loaded at once; one that is absent or a column may.
bool is_eight(const Operand &o, bool is_column = false) {
    return o.p == nullptr || is_column || ((o.format == PK_F32 || o.format == PK_BF16) && o.stride % 8 == 0 && reinterpret_cast<uintptr_t>(o.p) % 16 == 0);
}

int32_t launch_map(const Launch &l, const char *name, void (*kernel)(MapArguments), MapArguments &a, const pk_tensor &out) {
    a.info = l.info;
    a.out = operand(out);
    a.rows_symbol = out.rows;
    a.cols = static_cast<int32_t>(out.cols);
    const bool is_column = kernel == sigmoid_kernel && !a.act;
    a.is_wide = a.cols % 8 == 0 && is_eight(a.x) && is_eight(a.y, is_column) && is_eight(a.out) && kernel != gather_kernel;
    const int64_t rows = bound(l, out.rows), each = a.is_wide ? 2048 : 256;
    return launch(l, name, kernel, dim3(static_cast<unsigned>(std::min<int64_t>((out.cols + each - 1) / each, 64)), static_cast<unsigned>(rows)), dim3(256), 0, a);
}

}  // namespace

int32_t launch_norm(const Launch &l, const pk_op_norm &op) { return launch_norm_narrowing(l, op, {}); }

bool can_narrow(const pk_op_norm &op) { return op.out.data && op.out.format == PK_BF16 && op.out.cols <= kNarrowingMost && op.out.cols % 128 == 0 && op.out.stride % 16 == 0; }

int32_t launch_norm_narrowing(const Launch &l, const pk_op_norm &op, const Narrowed &to) {
    NormArguments a = {};
    a.narrowed = to;
    a.x = operand(op.x);
    if (op.residual.data) a.residual = operand(op.residual);
    if (op.out.data) a.out = operand(op.out);
    a.w = reinterpret_cast<const float *>(op.w.data);
    a.post_w = reinterpret_cast<const float *>(op.post_w.data);
    a.bias = reinterpret_cast<const float *>(op.bias.data);
    a.is_layer = op.kind == PK_NORM_LAYER;
    a.info = l.info;
    a.rows_symbol = op.x.rows;
    a.cols = static_cast<int32_t>(op.x.cols);
    a.eps = op.eps;
    a.residual_scale = op.residual_scale;
    const unsigned rows = static_cast<unsigned>(bound(l, op.x.rows));
    const int64_t eights = (op.x.cols + 7) / 8;
    // Many rows fill the device with small blocks; few rows want many threads each, whose sums come in another order.
    const bool is_plain = op.w.data && !op.post_w.data && !op.residual.data && !op.bias.data && op.out.data && !a.is_layer && op.x.cols % 8 == 0 && is_eight(a.x) && is_eight(a.out) && op.w.data % 16 == 0;
    if (rows > 256 && is_plain && eights <= kRowEights * kRowThreads && !is_invariant(l.ctx)) {
        const unsigned threads = static_cast<unsigned>((eights + kRowEights - 1) / kRowEights + 31) / 32 * 32;
        int each = 1;
        if (int32_t e = check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, norm_rows_kernel, static_cast<int>(threads), 0), "norm")) return e;
        return launch(l, "norm", norm_rows_kernel, dim3(std::min(rows, static_cast<unsigned>(each * l.ctx->n_processors))), dim3(threads), 0, a);
    }
    if (rows > 64 && eights <= 1024 && !is_invariant(l.ctx)) return launch(l, "norm", norm_kernel<32, 256>, dim3(rows), dim3(static_cast<unsigned>(std::max<int64_t>(32, (eights + 3) / 4 + 31) / 32 * 32)), 0, a);
    if (eights <= 1024) return launch(l, "norm", norm_kernel<8, 1024>, dim3(rows), dim3(static_cast<unsigned>((eights + 31) / 32 * 32)), 0, a);
    if (eights <= 4096) return launch(l, "norm", norm_kernel<32, 1024>, dim3(rows), dim3(1024), 0, a);
    return fail(PK_UNSUPPORTED, "norm: rows of %lld elements; the CUDA pack takes up to 32768", (long long)op.x.cols);
}

int32_t launch_gate(const Launch &l, const pk_op_gate &op) {
    MapArguments a = {};
    a.x = operand(op.x);
    a.act = op.act;
    a.is_gated = op.x.cols != op.out.cols;
    return launch_map(l, "gate", gate_kernel, a, op.out);
}

int32_t launch_gather(const Launch &l, const pk_op_gather &op) {
    MapArguments a = {};
    a.x = operand(op.x);
    a.sample_at = reinterpret_cast<const int32_t *>(l.state->sample_at);
    a.sample_row = reinterpret_cast<const int32_t *>(l.state->sample_row);
    a.row_start = reinterpret_cast<const int32_t *>(l.state->row_start);
    a.act = op.pool;
    return launch_map(l, "gather", gather_kernel, a, op.out);
}

int32_t launch_copy(const Launch &l, const pk_op_copy &op) {
    MapArguments a = {};
    a.x = operand(op.x);
    a.scale = 1.0f;
    if (op.x.format == op.out.format) {
        a.info = l.info;
        a.out = operand(op.out);
        a.rows_symbol = op.out.rows;
        const int64_t bytes = op.out.cols * (op.out.format == PK_F32 || op.out.format == PK_I32 ? 4 : op.out.format == PK_F16 || op.out.format == PK_BF16 ? 2 : 1);
        return launch(l, "copy", copy_kernel, dim3(static_cast<unsigned>(std::min<int64_t>((bytes + 255) / 256, 64)), static_cast<unsigned>(bound(l, op.out.rows))), dim3(256), 0, a,
                      op.x.stride, op.out.stride, bytes);
    }
    if (op.x.format == PK_I32 || op.x.format == PK_U8 || op.out.format == PK_I32 || op.out.format == PK_U8) return fail(PK_UNSUPPORTED, "copy: integers are copied to the same format only");
    return launch_map(l, "copy", add_kernel, a, op.out);
}

int32_t launch_add(const Launch &l, const pk_op_add &op) {
    MapArguments a = {};
    a.x = operand(op.x);
    if (op.y.data) a.y = operand(op.y);
    a.scale = op.scale;
    return launch_map(l, "add", add_kernel, a, op.out);
}

int32_t launch_sigmoid(const Launch &l, const pk_op_sigmoid &op) { return launch_sigmoid_narrowing(l, op, {}); }

bool can_narrow(const pk_op_sigmoid &op) {
    return op.out.format == PK_BF16 && op.out.cols % 128 == 0 && is_eight(operand(op.x)) && is_eight(operand(op.g), op.g.cols != op.x.cols) && is_eight(operand(op.out));
}

int32_t launch_sigmoid_narrowing(const Launch &l, const pk_op_sigmoid &op, const Narrowed &to) {
    MapArguments a = {};
    a.narrowed = to;
    a.x = operand(op.x);
    a.y = operand(op.g);
    a.act = op.g.cols == op.x.cols;
    return launch_map(l, "sigmoid", sigmoid_kernel, a, op.out);
}

}  // namespace pk
