// Gated short convolution: a thread per channel of a row. Rows of one token (decode) and of many (prefill) run alike: long rows
// are cut into pieces of kPiece tokens, and the last W - 1 products become the slot's tail when every piece has read the old one.
#include "../include/recurrent.cuh"

namespace pk {
namespace {

constexpr int kThreads = 128, kPiece = 32, kMostWidth = 16;

struct ConvArguments {
    RecurrentState state;
    const StepInfo *info;
    const void *x;
    void *out;
    const float *conv, *bias;
    int64_t x_stride, out_stride, tail_offset;
    int32_t x_format, out_format, cols, width;
};

// The product that is convolved, of the row's token t (negative: of the tail) and channel c.
__device__ __forceinline__ float product(const ConvArguments &a, const RecurrentRow &q, const float *tail, int t, int c) {
    if (t < 0) return q.begins ? 0.0f : tail[(a.width - 1 + t) * a.cols + c];
    const int64_t at = (q.first + t) * a.x_stride + c;
    return load_as_f32(a.x, at, a.x_format) * load_as_f32(a.x, at + 2 * a.cols, a.x_format);
}

__device__ __forceinline__ void keep_tail(const ConvArguments &a, const RecurrentRow &q, float *tail, int c) {
    float kept[kMostWidth - 1];
    for (int i = 0; i < a.width - 1; ++i) kept[i] = product(a, q, tail, q.n - a.width + 1 + i, c);
    for (int i = 0; i < a.width - 1; ++i) tail[i * a.cols + c] = kept[i];
}

// Grid: channels, rows, pieces. With one piece a row the tail is moved here.
__global__ void __launch_bounds__(kThreads) conv_kernel(const __grid_constant__ ConvArguments a, bool keeps_tail) {
    wait_dependence();
    release_dependents();
    const int c = blockIdx.x * kThreads + threadIdx.x, r = blockIdx.y;
    if (r >= a.info->n_rows || c >= a.cols) return;
    const RecurrentRow q = recurrent_row(a.state, r);
    float *tail = reinterpret_cast<float *>(q.memory + a.tail_offset);
    const float bias = a.bias != nullptr ? a.bias[c] : 0.0f;
    for (int first = blockIdx.z * kPiece; first < q.n; first += gridDim.z * kPiece)
        for (int t = first; t < min(first + kPiece, q.n); ++t) {
            float v = 0.0f;
            if (!q.is_dead) {
                float sum = bias;
                for (int i = 0; i < a.width; ++i) sum += a.conv[c * a.width + i] * product(a, q, tail, t - a.width + 1 + i, c);
                v = sum * load_as_f32(a.x, (q.first + t) * a.x_stride + a.cols + c, a.x_format);
            }
            store_from_f32(a.out, (q.first + t) * a.out_stride + c, a.out_format, v);
        }
    if (keeps_tail && !q.is_dead && q.n > 0) keep_tail(a, q, tail, c);
}

__global__ void __launch_bounds__(kThreads) conv_tail_kernel(const __grid_constant__ ConvArguments a) {
    wait_dependence();
    release_dependents();
    const int c = blockIdx.x * kThreads + threadIdx.x, r = blockIdx.y;
    if (r >= a.info->n_rows || c >= a.cols) return;
    const RecurrentRow q = recurrent_row(a.state, r);
    if (!q.is_dead && q.n > 0) keep_tail(a, q, reinterpret_cast<float *>(q.memory + a.tail_offset), c);
}

}  // namespace

int32_t launch_conv(const Launch &l, const pk_op_conv &op) {
    ConvArguments a = {};
    a.state = recurrent_state(*l.state);
    a.info = l.info;
    a.x = reinterpret_cast<const void *>(op.x.data);
    a.out = reinterpret_cast<void *>(op.out.data);
    a.conv = reinterpret_cast<const float *>(op.conv.data);
    a.bias = reinterpret_cast<const float *>(op.bias.data);
    a.x_stride = op.x.stride / (op.x.format == PK_F32 ? 4 : 2);
    a.out_stride = op.out.stride / (op.out.format == PK_F32 ? 4 : 2);
    a.tail_offset = op.conv_offset;
    a.x_format = op.x.format;
    a.out_format = op.out.format;
    a.cols = static_cast<int32_t>(op.out.cols);
    a.width = op.conv_width;
    const unsigned blocks = static_cast<unsigned>((op.out.cols + kThreads - 1) / kThreads), rows = static_cast<unsigned>(max_rows_of(l));
    const unsigned pieces = l.decode_only ? 1 : static_cast<unsigned>((l.max_tokens + kPiece - 1) / kPiece);
    // Many short rows and few long ones meet in one launch: more than a wave of pieces helps nobody.
    const unsigned z = pieces * rows * blocks > 65536 ? (65536 + rows * blocks - 1) / (rows * blocks) : pieces;
    if (int32_t e = launch(l, "conv", conv_kernel, dim3(blocks, rows, z), dim3(kThreads), 0, a, z == 1)) return e;
    return z == 1 ? PK_OK : launch(l, "conv_tail", conv_tail_kernel, dim3(blocks, rows), dim3(kThreads), 0, a);
}

}  // namespace pk
