// Packed weights back to bf16 rows: panels for the tiled matmul, and rows of a table for the embedding op.
//
// Block formats: a warp reads one unit (16 rows x kU) as the matmul does. Row-major formats: eight elements a thread.
#include "../include/device.cuh"
#include "../include/format/rows.cuh"
#include "../include/format/unit.cuh"

namespace pk {
namespace {

struct PanelArguments {
    const uint8_t *data;
    uint8_t *out;
    const float *row_scale, *block_scale;
    int64_t out_row_bytes, row_bytes;
    int32_t first_row, n_rows, n_units, block_stride;
    float scale;
};

template <int kFormat>
__global__ void __launch_bounds__(128) panel_block_kernel(const __grid_constant__ PanelArguments a) {
    using U = Unit<kFormat>;
    wait_dependence();
    release_dependents();
    const int lane = threadIdx.x & 31, unit = blockIdx.x * 4 + (threadIdx.x >> 5);
    if (unit >= a.n_units) return;
    UnitRegisters<U> u;
    load_unit<U>(u, a.data + ((static_cast<int64_t>(a.first_row >> 4) + blockIdx.y) * a.n_units + unit) * U::kBytes, lane);
#pragma unroll
    for (int b = 0; b < U::kU / 32; ++b)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float v[8];
            unit_values<U>(u, b, half, v);
            const int row = blockIdx.y * 16 + (lane >> 2) + 8 * half;
            if (row >= a.n_rows) continue;
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] *= a.scale;
            uint4 p = pack8(v);
            uint8_t *out = a.out + row * a.out_row_bytes + (static_cast<int64_t>(unit) * U::kU + 32 * b + 4 * (lane & 3)) * 2;
            *reinterpret_cast<uint2 *>(out) = make_uint2(p.x, p.y);
            *reinterpret_cast<uint2 *>(out + 32) = make_uint2(p.z, p.w);
        }
}

template <int kFormat>
__global__ void __launch_bounds__(256) panel_rows_kernel(const __grid_constant__ PanelArguments a) {
    wait_dependence();
    release_dependents();
    const int row = blockIdx.y;
    const float scale = a.scale * (a.row_scale != nullptr ? a.row_scale[a.first_row + row] : 1.0f);
    const int n = a.n_units * Rows<kFormat>::kU;
    for (int k = (blockIdx.x * 256 + threadIdx.x) * 8; k < n; k += gridDim.x * 256 * 8) {
        float s = scale, v[8];
        if (a.block_scale != nullptr) s *= a.block_scale[((a.first_row + row) >> 7) * a.block_stride + (k >> 7)];
        const uint8_t *p = a.data + (a.first_row + row) * a.row_bytes + k * Rows<kFormat>::kElementBytes;
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = load_as_f32(p, i, kFormat) * s;
        *reinterpret_cast<uint4 *>(a.out + row * a.out_row_bytes + 2 * k) = pack8(v);
    }
}

struct EmbedArguments {
    const uint8_t *table;
    void *out;
    const StepInfo *info;
    const int32_t *token, *position;
    const float *positions, *types;
    const float *row_scale, *block_scale;
    int64_t row_bytes, out_stride, rows_symbol;
    int32_t n_units, cols, n_rows, out_format, format, block_stride, n_types, n_positions, position_offset;
    float scale;
    // Of lookups in a stack of pieces; else piece_rows is 0. A negative number gives zeros.
    int64_t piece_bytes;
    int32_t piece_rows;
};

// Where the piece with row `id` begins; id becomes a row of the piece.
__device__ __forceinline__ int64_t piece_of(const EmbedArguments &a, int &id) {
    if (a.piece_rows == 0) return 0;
    const int piece = id / a.piece_rows;
    id -= piece * a.piece_rows;
    return piece * a.piece_bytes;
}

__device__ __forceinline__ int token_of(const EmbedArguments &a, int t) {
    int id = a.token[t];
    if (a.types != nullptr && id >= 0 && id < a.n_rows * a.n_types) id %= a.n_rows;
    return id < 0 ? 0 : id >= a.n_rows ? a.n_rows - 1 : id;
}

// What position and type of token t add to element k of its row.
__device__ __forceinline__ float addend(const EmbedArguments &a, int t, int k) {
    float v = 0.0f;
    if (a.positions != nullptr) v += a.positions[static_cast<int64_t>(min(a.position[t] + a.position_offset, a.n_positions - 1)) * a.cols + k];
    if (a.types != nullptr) v += a.types[static_cast<int64_t>(min(max(a.token[t], 0) / a.n_rows, a.n_types - 1)) * a.cols + k];
    return v;
}

// A block per token; row-major tables of any plain format.
__global__ void __launch_bounds__(256) embed_rows_kernel(const __grid_constant__ EmbedArguments a) {
    release_dependents();  // whoever waits for this kernel waits for those before it
    wait_dependence();
    const int t = blockIdx.x;
    if (t >= rows_of(a.info, a.rows_symbol)) return;
    int id = token_of(a, t);
    const int64_t piece = piece_of(a, id);
    const uint8_t *row = a.table + piece + id * a.row_bytes;
    const float scale = a.piece_rows > 0 && a.token[t] < 0 ? 0.0f : a.scale * (a.row_scale != nullptr ? a.row_scale[piece / 4 + id] : 1.0f);
    for (int k = threadIdx.x; k < a.cols; k += 256) {
        float v = load_as_f32(row, k, a.format) * scale;
        if (a.block_scale != nullptr) v *= a.block_scale[piece / 4 + (id >> 7) * a.block_stride + (k >> 7)];
        store_from_f32(a.out, t * a.out_stride + k, a.out_format, v + addend(a, t, k));
    }
}

// The values of block `at` of a unit's row `in`, an element a lane. One code a block: words are picked when it is compiled.
template <class U, int kBlock = 0>
__device__ __forceinline__ float embedded(const UnitRegisters<U> &u, int at, int in, int lane) {
    if constexpr (kBlock < U::kU / 32) {
        if (at != kBlock) return embedded<U, kBlock + 1>(u, at, in, lane);
        float v[2][8], out = 0.0f;
        unit_values<U>(u, kBlock, 0, v[0]);
        unit_values<U>(u, kBlock, 1, v[1]);
        const int from = (in & 7) * 4 + (lane & 15) / 4, mine = (lane & 3) + lane / 16 * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float one = __shfl_sync(~0u, in & 8 ? v[1][i] : v[0][i], from);
            if (i == mine) out = one;
        }
        return out;
    } else {
        return 0.0f;
    }
}

// A warp per token and unit, or block of a unit: it decodes the tile of 16 rows and keeps one. Of few rows a warp takes a block only: the code is as cold as the table
// then, and comes from memory line by line. Their thread blocks are large, and few: behind them the one-row launch begins where none of them waits.
constexpr int embed_warps(bool is_few) { return is_few ? 32 : 4; }
template <int kFormat, bool kFew>
__global__ void __launch_bounds__(32 * embed_warps(kFew)) embed_block_kernel(const __grid_constant__ EmbedArguments a) {
    using U = Unit<kFormat>;
    constexpr int kBlocks = U::kU / 32, n_blocks = kFew ? 1 : kBlocks;
    release_dependents();  // whoever waits for this kernel waits for those before it
    wait_dependence();
    const int t = blockIdx.x, lane = threadIdx.x & 31, first = (blockIdx.y * embed_warps(kFew) + (threadIdx.x >> 5)) * n_blocks, unit = first / kBlocks;
    if (t >= rows_of(a.info, a.rows_symbol) || unit >= a.n_units) return;
    int id = token_of(a, t);
    const int64_t piece = piece_of(a, id);
    const float scale = a.piece_rows > 0 && a.token[t] < 0 ? 0.0f : a.scale;
    UnitRegisters<U> u;
    load_unit<U>(u, a.table + piece + (static_cast<int64_t>(id >> 4) * a.n_units + unit) * U::kBytes, lane);
#pragma unroll 1
    for (int b = first; b < first + n_blocks; ++b) {
        const float v = embedded<U>(u, b % kBlocks, id & 15, lane);
        const int k = 32 * b + lane;
        if (k < a.cols) store_from_f32(a.out, t * a.out_stride + k, a.out_format, v * scale + addend(a, t, k));
    }
}

}  // namespace

int32_t launch_dequantize(const Launch &launched, const Packed &p, uint64_t data, int64_t first_row, int64_t n_rows, void *out, int64_t out_row_bytes) {
    Launch l = launched;
    l.overlap = true;  // a panel's pieces follow each other
    PanelArguments a = {};
    a.data = reinterpret_cast<const uint8_t *>(data);
    a.out = static_cast<uint8_t *>(out);
    const float *scales = reinterpret_cast<const float *>(a.data + p.scales);
    a.row_scale = p.scale_kind == PK_SCALES_ROW ? scales : nullptr;
    a.block_scale = p.scale_kind == PK_SCALES_BLOCK ? scales : nullptr;
    a.out_row_bytes = out_row_bytes;
    a.row_bytes = p.row_bytes;
    a.first_row = static_cast<int32_t>(first_row);
    a.n_rows = static_cast<int32_t>(n_rows);
    a.block_stride = static_cast<int32_t>(p.scale_stride);
    a.scale = p.scale;
    int32_t status = PK_OK;
    const bool is_block = with_unit(p.format, [&](auto u) {
        a.n_units = static_cast<int32_t>(p.padded_cols / decltype(u)::kU);
    });
    const dim3 grid((a.n_units + 3) / 4, static_cast<unsigned>((n_rows + 15) / 16));
    if (is_block) {
        switch (p.format) {
#define PK_CASE(F) case F: return launch(l, "dequantize", panel_block_kernel<F>, grid, dim3(128), 0, a);
            PK_CASE(PK_Q8_0) PK_CASE(PK_Q4_0) PK_CASE(PK_Q4_1) PK_CASE(PK_Q5_0) PK_CASE(PK_Q5_1) PK_CASE(PK_Q2_K) PK_CASE(PK_Q3_K)
            PK_CASE(PK_Q4_K) PK_CASE(PK_Q5_K) PK_CASE(PK_Q6_K) PK_CASE(PK_IQ4_NL) PK_CASE(PK_IQ4_XS) PK_CASE(PK_MXFP4) PK_CASE(PK_NVFP4)
#undef PK_CASE
        }
        return status;
    }
    const bool is_fp8 = p.format == PK_FP8_E4M3 || p.format == PK_FP8_E5M2;
    a.n_units = static_cast<int32_t>(p.padded_cols / (is_fp8 ? 128 : 64));
    const dim3 rows_grid(static_cast<unsigned>((p.padded_cols + 2047) / 2048), static_cast<unsigned>(n_rows));
    switch (p.format) {
        case PK_F16: return launch(l, "dequantize", panel_rows_kernel<PK_F16>, rows_grid, dim3(256), 0, a);
        case PK_BF16: return launch(l, "dequantize", panel_rows_kernel<PK_BF16>, rows_grid, dim3(256), 0, a);
        case PK_FP8_E4M3: return launch(l, "dequantize", panel_rows_kernel<PK_FP8_E4M3>, rows_grid, dim3(256), 0, a);
        case PK_FP8_E5M2: return launch(l, "dequantize", panel_rows_kernel<PK_FP8_E5M2>, rows_grid, dim3(256), 0, a);
        default: return fail(PK_UNSUPPORTED, "dequantize: no kernel for weight format %d", p.format);
    }
}

int32_t check_embed(pk_ctx *ctx, const pk_op_embed &op, int64_t at) {
    for (const pk_tensor *t : {&op.positions, &op.types})
        if (t->data && t->rows > 1 && t->stride != 4 * t->cols) return fail(PK_UNSUPPORTED, "op %lld embed: the CUDA pack wants added rows without gaps", (long long)at);
    if (op.table.layout == PK_PACKED) {
        if (find_packed(ctx, op.table) == nullptr) return fail(PK_BAD_ARG, "op %lld embed: the table was not made by pk_repack of this context", (long long)at);
        return PK_OK;
    }
    if (op.table.format > PK_FP8_E5M2) return fail(PK_UNSUPPORTED, "op %lld embed: the CUDA pack reads unpacked tables of F32, F16, BF16 and FP8 only, not format %d", (long long)at, op.table.format);
    return PK_OK;
}

static int32_t start_embed(const Launch &l, const Packed *p, EmbedArguments &a, unsigned rows);

int32_t launch_lookup(const Launch &l, const pk_tensor &table, int32_t n_rows, const int32_t *ids, const pk_tensor &out) {
    const Packed *p = find_packed(l.ctx, table);
    EmbedArguments a = {};
    a.table = reinterpret_cast<const uint8_t *>(table.data);
    a.out = reinterpret_cast<void *>(out.data);
    a.info = l.info;
    a.token = ids;
    a.out_stride = out.stride / (out.format == PK_F32 ? 4 : 2);
    a.rows_symbol = out.rows;
    a.cols = static_cast<int32_t>(table.cols);
    a.n_rows = n_rows;
    a.out_format = out.format;
    a.scale = 1.0f;
    a.piece_bytes = table.stride;
    a.piece_rows = static_cast<int32_t>(table.rows);
    return start_embed(l, p, a, static_cast<unsigned>(bound(l, out.rows)));
}

int32_t launch_embed(const Launch &l, const pk_op_embed &op) {
    const Packed *p = op.table.layout == PK_PACKED ? find_packed(l.ctx, op.table) : nullptr;
    EmbedArguments a = {};
    a.table = reinterpret_cast<const uint8_t *>(op.table.data);
    a.out = reinterpret_cast<void *>(op.out.data);
    a.info = l.info;
    a.token = reinterpret_cast<const int32_t *>(l.state->token_id);
    a.position = reinterpret_cast<const int32_t *>(l.state->token_position);
    a.positions = reinterpret_cast<const float *>(op.positions.data);
    a.types = reinterpret_cast<const float *>(op.types.data);
    a.n_positions = static_cast<int32_t>(op.positions.rows);
    a.n_types = static_cast<int32_t>(op.types.rows);
    a.position_offset = op.position_offset;
    a.out_stride = op.out.stride / (op.out.format == PK_F32 ? 4 : 2);
    a.rows_symbol = op.out.rows;
    a.cols = static_cast<int32_t>(op.table.cols);
    a.n_rows = static_cast<int32_t>(op.table.rows);
    a.out_format = op.out.format;
    a.scale = op.scale;
    a.row_bytes = op.table.stride;
    a.format = op.table.format;
    return start_embed(l, p, a, static_cast<unsigned>(bound(l, op.out.rows)));
}

// The launch, of a packed table or of plain rows.
static int32_t start_embed(const Launch &l, const Packed *p, EmbedArguments &a, unsigned rows) {
    if (p != nullptr) {
        const float *scales = reinterpret_cast<const float *>(a.table + p->scales);
        a.row_scale = p->scale_kind == PK_SCALES_ROW ? scales : nullptr;
        a.block_scale = p->scale_kind == PK_SCALES_BLOCK ? scales : nullptr;
        a.block_stride = static_cast<int32_t>(p->scale_stride);
        a.row_bytes = p->row_bytes;
        a.format = p->format;
        a.scale *= p->scale;
    }
    if (p == nullptr || !is_block_format(p->format)) return launch(l, "embed", embed_rows_kernel, dim3(rows), dim3(256), 0, a);
    int32_t n_blocks = 0;
    with_unit(p->format, [&](auto u) {
        a.n_units = static_cast<int32_t>(p->padded_cols / decltype(u)::kU);
        n_blocks = decltype(u)::kU / 32;
    });
    const bool is_few = rows <= 8;
    const int warps = embed_warps(is_few);
    const dim3 grid(rows, ((is_few ? a.n_units * n_blocks : a.n_units) + warps - 1) / warps);
    switch (p->format) {
#define PK_CASE(F) case F: return launch(l, "embed", is_few ? embed_block_kernel<F, true> : embed_block_kernel<F, false>, grid, dim3(32 * warps), 0, a);
        PK_CASE(PK_Q8_0) PK_CASE(PK_Q4_0) PK_CASE(PK_Q4_1) PK_CASE(PK_Q5_0) PK_CASE(PK_Q5_1) PK_CASE(PK_Q2_K) PK_CASE(PK_Q3_K)
        PK_CASE(PK_Q4_K) PK_CASE(PK_Q5_K) PK_CASE(PK_Q6_K) PK_CASE(PK_IQ4_NL) PK_CASE(PK_IQ4_XS) PK_CASE(PK_MXFP4) PK_CASE(PK_NVFP4)
#undef PK_CASE
        default: return PK_UNSUPPORTED;
    }
}

}  // namespace pk
