// pk_packed_bytes and pk_repack: checkpoint layout to kernel layout, streamed through two pinned buffers and converted on
// the device. Block formats become tiles (include/format/unit.cuh), plain ones stay row-major with padded rows.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "../include/device.cuh"
#include "../include/format/rows.cuh"
#include "../include/format/unit.cuh"
#include "../include/repack.cuh"

namespace pk {
namespace {

constexpr int64_t kRowPad = 32;

__host__ __device__ constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Bytes and elements of a block as GGUF stores it.
struct Block {
    int32_t bytes = 0, elements = 0;
};
__host__ __device__ constexpr Block block_of(int32_t format) {
    switch (format) {
        case PK_F32: return {4, 1};
        case PK_F16: case PK_BF16: return {2, 1};
        case PK_FP8_E4M3: case PK_FP8_E5M2: return {1, 1};
        case PK_Q8_0: return {34, 32};
        case PK_Q4_0: case PK_IQ4_NL: return {18, 32};
        case PK_Q4_1: case PK_Q4_Z: return {20, 32};
        case PK_Q5_0: return {22, 32};
        case PK_Q5_1: return {24, 32};
        case PK_Q2_K: return {84, 256};
        case PK_Q3_K: return {110, 256};
        case PK_Q4_K: return {144, 256};
        case PK_Q5_K: return {176, 256};
        case PK_Q6_K: return {210, 256};
        case PK_IQ4_XS: return {136, 256};
        case PK_MXFP4: return {17, 32};
        case PK_NVFP4: return {36, 64};
        default: return {};
    }
}

__device__ __forceinline__ uint32_t nibble(uint8_t b, int high) { return high ? b >> 4 : b & 15; }

// The stored code of element k (within its block) of a GGUF block.
// Source: ggml/src/ggml-common.h for the layouts, ggml-quants.c, dequantize_row_*, for the order.
template <int F>
__device__ uint32_t code_of(const uint8_t *b, int k) {
    if constexpr (F == PK_Q8_0) return b[2 + k];
    if constexpr (F == PK_Q4_0 || F == PK_IQ4_NL) return nibble(b[2 + (k & 15)], k >> 4);
    if constexpr (F == PK_Q4_1) return nibble(b[4 + (k & 15)], k >> 4);
    if constexpr (F == PK_Q5_0) return nibble(b[6 + (k & 15)], k >> 4) | ((b[2 + (k >> 3)] >> (k & 7)) & 1) << 4;
    if constexpr (F == PK_Q5_1) return nibble(b[8 + (k & 15)], k >> 4) | ((b[4 + (k >> 3)] >> (k & 7)) & 1) << 4;
    if constexpr (F == PK_Q2_K) return (b[16 + (k >> 7) * 32 + (k & 31)] >> (2 * ((k & 127) >> 5))) & 3;
    if constexpr (F == PK_Q3_K) return ((b[32 + (k >> 7) * 32 + (k & 31)] >> (2 * ((k & 127) >> 5))) & 3) | ((b[k & 31] >> (k >> 5)) & 1) << 2;
    if constexpr (F == PK_Q4_K) return nibble(b[16 + (k >> 6) * 32 + (k & 31)], (k >> 5) & 1);
    if constexpr (F == PK_Q5_K) return nibble(b[48 + (k >> 6) * 32 + (k & 31)], (k >> 5) & 1) | ((b[16 + (k & 31)] >> (k >> 5)) & 1) << 4;
    if constexpr (F == PK_Q6_K) return nibble(b[(k >> 7) * 64 + (k & 63)], (k >> 6) & 1) | ((b[128 + (k >> 7) * 32 + (k & 31)] >> (2 * ((k & 127) >> 5))) & 3) << 4;
    if constexpr (F == PK_IQ4_XS) return nibble(b[8 + (k >> 5) * 16 + (k & 15)], (k >> 4) & 1);
    if constexpr (F == PK_MXFP4) return nibble(b[1 + (k & 15)], k >> 4);
    if constexpr (F == PK_NVFP4) return nibble(b[4 + (k >> 4) * 8 + (k & 7)], (k >> 3) & 1);
    return 0;
}

// Of a block of Q4_Z as a code of Q5_0.
__device__ __forceinline__ uint32_t zeroed_code(const uint8_t *b, int k) { return nibble(b[4 + (k & 15)], k >> 4) + 16 - b[2]; }

// Scale and minimum of group j of the 12 packed bytes of q4_k and q5_k.
__device__ __forceinline__ uint32_t six_bits(const uint8_t *p, int j, bool minimum) {
    const uint8_t *first = p + (minimum ? 4 : 0);
    if (j < 4) return first[j] & 63;
    return nibble(p[8 + j - 4], minimum) | (first[j - 4] >> 6) << 4;
}

// Writes the scales of one row of a unit; `b` is the row's first block in the unit, `n` the elements that exist.
template <int F>
__device__ void write_scales(const RepackArguments &a, int64_t row, int64_t k0, int n, uint8_t *scale, uint8_t *factor) {
    using U = Unit<F>;
    constexpr Block kBlock = block_of(F);
    const int64_t block_bytes = a.block_bytes ? a.block_bytes : kBlock.bytes;
    const uint8_t *b = a.source + row * a.row_bytes + k0 / kBlock.elements * block_bytes;
    if constexpr (F == PK_MXFP4 || F == PK_NVFP4) {
        for (int g = 0; g < U::kGroups; ++g) {
            uint8_t s = 0;
            if (g * U::kGroup < n) {
                if (a.group_scales != nullptr) s = a.group_scales[row * a.scale_cols + k0 / U::kGroup + g];
                else if (F == PK_MXFP4) s = b[g * kBlock.bytes];
                else s = b[(g / 4) * kBlock.bytes + (g & 3)];
            }
            scale[g] = F == PK_NVFP4 && (s & 127) == 127 ? 0 : s;
        }
    } else if constexpr (U::kU == 128) {
        for (int g = 0; g < 4; ++g) {
            const bool in = g * 32 < n;
            const uint8_t *p = b + g * block_bytes;
            if constexpr (U::kScale == Scale::kHalf) {
                scale[2 * g] = in ? p[0] : 0;
                scale[2 * g + 1] = in ? p[1] : 0;
            } else {
                for (int j = 0; j < 4; ++j) scale[4 * g + j] = in ? p[j] : 0;
            }
        }
    } else if constexpr (F == PK_Q4_K || F == PK_Q5_K) {
        for (int g = 0; g < 8; ++g) {
            scale[g] = static_cast<uint8_t>(six_bits(b + 4, g, false));
            scale[8 + g] = static_cast<uint8_t>(six_bits(b + 4, g, true));
        }
        for (int j = 0; j < 4; ++j) factor[j] = b[j];
    } else if constexpr (F == PK_Q2_K) {
        for (int g = 0; g < 16; ++g) scale[g] = b[g];
        for (int j = 0; j < 4; ++j) factor[j] = b[80 + j];
    } else if constexpr (F == PK_Q3_K) {
        for (int g = 0; g < 16; ++g) scale[g] = static_cast<uint8_t>((nibble(b[96 + (g & 7)], g >> 3) | ((b[104 + (g & 3)] >> (2 * (g >> 2))) & 3) << 4) - 32 + 128);
        factor[0] = b[108]; factor[1] = b[109];
    } else if constexpr (F == PK_Q6_K) {
        for (int g = 0; g < 16; ++g) scale[g] = b[192 + g] ^ 128;
        factor[0] = b[208]; factor[1] = b[209];
    } else if constexpr (F == PK_IQ4_XS) {
        uint32_t high = b[2] | b[3] << 8;
        for (int g = 0; g < 8; ++g) scale[g] = static_cast<uint8_t>((nibble(b[4 + g / 2], g & 1) | ((high >> (2 * g)) & 3) << 4) - 32 + 128);
        factor[0] = b[0]; factor[1] = b[1];
    }
}

// One warp a unit. Grid: units in x, row tiles in y. Rows and columns that do not exist become zeros.
template <int F>
__global__ void __launch_bounds__(32) repack_kernel(const __grid_constant__ RepackArguments a) {
    using U = Unit<F>;
    constexpr Block kBlock = block_of(F);
    const int lane = threadIdx.x, r = lane >> 2, c = lane & 3;
    const int64_t k0 = static_cast<int64_t>(blockIdx.x) * U::kU;
    uint8_t *unit = a.out + (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * U::kBytes;
    uint32_t low[4 * U::kLowVectors] = {}, high[U::kHighWords ? U::kHighWords : 1] = {};
    for (int half = 0; half < 2; ++half) {
        const int64_t row = static_cast<int64_t>(blockIdx.y) * 16 + r + 8 * half;
        for (int b = 0; b < U::kU / 32; ++b) {
            for (int j = 0; j < 8; ++j) {
                const int64_t k = k0 + 32 * b + (j < 4 ? 4 * c + j : 12 + 4 * c + j);
                uint32_t v = U::kOwnZero;
                if (row < a.n_rows && k < a.cols) {
                    if (a.group_scales != nullptr) v = nibble(a.source[row * a.row_bytes + k / 2], k & 1);
                    else if (F == PK_Q5_0 && a.block_bytes) v = zeroed_code(a.source + row * a.row_bytes + k / 32 * a.block_bytes, static_cast<int>(k % 32));
                    else v = code_of<F>(a.source + row * a.row_bytes + k / kBlock.elements * kBlock.bytes, static_cast<int>(k % kBlock.elements));
                }
                const int i = j >> 1, side = 16 * (j & 1);
                if constexpr (U::kLow == 8) {
                    // Bytes (0, 2) and (1, 3) of a word are pairs.
                    low[4 * b + 2 * half + (j >> 2)] |= v << (8 * (((j & 1) << 1) | ((j >> 1) & 1)));
                } else if constexpr (U::kCode == Code::kTable) {
                    low[4 * (b / 2) + (b & 1) * 2 + half] |= v << (16 * (j >> 2) + 4 * (((j & 1) << 1) | ((j >> 1) & 1)));
                } else if constexpr (U::kLow == 4) {
                    low[4 * (b / 2) + (b & 1) * 2 + half] |= (v & 15) << (4 * i + side);
                } else {
                    low[4 * half + b / 2] |= (v & 3) << ((b & 1) * 8 + 2 * i + side);
                }
                if constexpr (U::kHigh == 1) high[half * (U::kHighWords / 2) + b / 4] |= (v >> U::kLow) << ((b & 3) * 4 + i + side);
                if constexpr (U::kHigh == 2) high[half * 4 + b / 2] |= (v >> U::kLow) << ((b & 1) * 8 + 2 * i + side);
            }
        }
    }
    for (int i = 0; i < U::kLowVectors; ++i) reinterpret_cast<uint4 *>(unit)[32 * i + lane] = make_uint4(low[4 * i], low[4 * i + 1], low[4 * i + 2], low[4 * i + 3]);
    uint32_t *high_out = reinterpret_cast<uint32_t *>(unit + U::kLowBytes);
    for (int i = 0; i < U::kHighWords; ++i) high_out[U::kHighWords == 8 ? (i / 4) * 128 + 4 * lane + (i & 3) : U::kHighWords * lane + i] = high[i];
    if (lane < 16) {
        const int64_t row = static_cast<int64_t>(blockIdx.y) * 16 + lane;
        uint8_t *scale = unit + U::kScaleAt + ((lane & 7) * 2 + (lane >> 3)) * U::kRowScaleBytes;
        uint8_t *factor = unit + U::kFactorAt + ((lane & 7) * 2 + (lane >> 3)) * U::kRowFactorBytes;
        if (row < a.n_rows) {
            write_scales<F>(a, row, k0, static_cast<int>(a.cols - k0 < U::kU ? a.cols - k0 : U::kU), scale, factor);
        } else {
            for (int i = 0; i < U::kRowScaleBytes; ++i) scale[i] = 0;
            for (int i = 0; i < U::kRowFactorBytes; ++i) factor[i] = 0;
        }
    }
}

__global__ void narrow_kernel(const __grid_constant__ RepackArguments a, int64_t out_row_bytes) {
    const float *in = reinterpret_cast<const float *>(a.source + blockIdx.y * a.row_bytes);
    bf16 *out = reinterpret_cast<bf16 *>(a.out + blockIdx.y * out_row_bytes);
    for (int64_t k = blockIdx.x * blockDim.x + threadIdx.x; k < a.cols; k += static_cast<int64_t>(gridDim.x) * blockDim.x) out[k] = __float2bfloat16(in[k]);
}

template <int F>
void repack_rows(const RepackArguments &a, int64_t n_units, int64_t n_tiles, cudaStream_t stream) {
    repack_kernel<F><<<dim3(n_units, n_tiles), 32, 0, stream>>>(a);
}

int32_t convert(const Packed &p, const RepackArguments &a, int64_t padded_rows, cudaStream_t stream) {
    const int64_t tiles = padded_rows / 16;
    switch (p.format) {
#define PK_CASE(F) case F: repack_rows<F>(a, p.padded_cols / Unit<F>::kU, tiles, stream); break;
        PK_CASE(PK_Q8_0) PK_CASE(PK_Q4_0) PK_CASE(PK_Q4_1) PK_CASE(PK_Q5_0) PK_CASE(PK_Q5_1) PK_CASE(PK_Q2_K) PK_CASE(PK_Q3_K)
        PK_CASE(PK_Q4_K) PK_CASE(PK_Q5_K) PK_CASE(PK_Q6_K) PK_CASE(PK_IQ4_NL) PK_CASE(PK_IQ4_XS) PK_CASE(PK_MXFP4) PK_CASE(PK_NVFP4)
#undef PK_CASE
        default: return fail(PK_UNSUPPORTED, "repack: no kernel for weight format %d", p.format);
    }
    return check(cudaGetLastError(), "repack");
}

}  // namespace

int32_t describe(const pk_source &s, Packed *out) {
    const Block block = block_of(s.format);
    if (block.bytes == 0) return fail(PK_UNSUPPORTED, "repack: the CUDA pack has no kernels for weight format %d (it has F32, F16, BF16, FP8, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4, Q4_Z)", s.format);
    const bool grouped = s.scales == PK_SCALES_GROUP;
    if (s.rows < 1 || s.cols < 1 || (!grouped && s.cols % block.elements)) return fail(PK_BAD_ARG, "repack: %lld x %lld is no shape of format %d (blocks of %d)", (long long)s.rows, (long long)s.cols, s.format, block.elements);
    const int64_t need = grouped ? s.rows * s.cols / 2 : s.rows * (s.cols / block.elements) * block.bytes;
    if (s.n_bytes != need) return fail(PK_BAD_ARG, "repack: %lld x %lld of format %d is %lld bytes, the source has %lld", (long long)s.rows, (long long)s.cols, s.format, (long long)need, (long long)s.n_bytes);
    if (s.offset != 0.0f) return fail(PK_UNSUPPORTED, "repack: the CUDA pack adds no offset to matrices");
    const int64_t stop = s.part_rows ? s.first_row + s.part_rows : s.rows;
    if (s.first_row < 0 || stop <= s.first_row || stop > s.rows || s.first_row % 128 || (stop % 128 && stop < s.rows)) return fail(PK_BAD_ARG, "repack: rows %lld to %lld of %lld are no part that begins and ends at a multiple of 128", (long long)s.first_row, (long long)stop, (long long)s.rows);
    Packed p;
    p.format = stored_format(s.format);
    p.rows = s.rows;
    p.cols = s.cols;
    p.padded_rows = round_up(s.rows, kRowPad);
    p.scale = s.global_scale == 0.0f ? 1.0f : s.global_scale;
    const bool is_block = is_block_format(p.format);
    if (grouped && p.format != PK_MXFP4 && p.format != PK_NVFP4) return fail(PK_UNSUPPORTED, "repack: format %d has no group scales", s.format);
    if (is_block) {
        int64_t unit = 0, bytes = 0;
        with_unit(p.format, [&](auto u) { unit = decltype(u)::kU; bytes = decltype(u)::kBytes; });
        p.padded_cols = round_up(s.cols, unit);
        p.n_bytes = p.padded_rows / 16 * (p.padded_cols / unit) * bytes;
    } else {
        const bool is_fp8 = p.format == PK_FP8_E4M3 || p.format == PK_FP8_E5M2;
        p.padded_cols = round_up(s.cols, is_fp8 ? 128 : 64);
        p.row_bytes = p.padded_cols * (is_fp8 ? 1 : 2);
        p.n_bytes = p.padded_rows * p.row_bytes;
        if (s.scales == PK_SCALES_ROW) {
            if (s.scale_rows * s.scale_cols != s.rows) return fail(PK_BAD_ARG, "repack: %lld row scales for %lld rows", (long long)(s.scale_rows * s.scale_cols), (long long)s.rows);
            p.scale_kind = PK_SCALES_ROW;
            p.scale_stride = 1;
            p.scales = p.n_bytes;
            p.n_bytes += p.padded_rows * 4;
        } else if (s.scales == PK_SCALES_BLOCK) {
            if (s.block_rows != 128 || s.block_cols != 128) return fail(PK_UNSUPPORTED, "repack: scale blocks of %d x %d; the CUDA pack has kernels for 128 x 128", s.block_rows, s.block_cols);
            if (s.scale_rows != (s.rows + 127) / 128 || s.scale_cols != (s.cols + 127) / 128) return fail(PK_BAD_ARG, "repack: %lld x %lld block scales for %lld x %lld elements", (long long)s.scale_rows, (long long)s.scale_cols, (long long)s.rows, (long long)s.cols);
            p.scale_kind = PK_SCALES_BLOCK;
            p.scale_stride = p.padded_cols / 128;
            p.scales = p.n_bytes;
            p.n_bytes += s.scale_rows * p.scale_stride * 4;
        }
    }
    if (p.scale_kind == PK_SCALES_NONE && s.scales == PK_SCALES_TENSOR && s.scale_data) p.scale *= *reinterpret_cast<const float *>(s.scale_data);
    p.scale_at = p.n_bytes;
    p.n_bytes = round_up(p.n_bytes + 4, 256);
    *out = p;
    return PK_OK;
}

// One thread copies at a fraction of the speed of the memory and of PCIe.
static void copy_in_parts(void *to, const uint8_t *from, int64_t n_bytes) {
    constexpr int64_t kPart = 4 << 20;
    const int64_t n_parts = std::min<int64_t>(8, (n_bytes + kPart - 1) / kPart), part = n_parts ? (n_bytes + n_parts - 1) / n_parts : 0;
    auto copy = [&](int64_t at) { std::memcpy(static_cast<uint8_t *>(to) + at, from + at, std::min(part, n_bytes - at)); };
    std::vector<std::thread> threads;
    for (int64_t at = part; at < n_bytes; at += part) threads.emplace_back(copy, at);
    if (n_bytes > 0) copy(0);
    for (std::thread &t : threads) t.join();
}

static bool lies_pinned(const void *p) {
    cudaPointerAttributes found = {};
    const bool is = cudaPointerGetAttributes(&found, p) == cudaSuccess && found.type == cudaMemoryTypeHost;
    cudaGetLastError();
    return is;
}

static int32_t repack_on_device(pk_ctx *ctx, const pk_source &s, uint64_t device, const Packed &p, RepackBuffers &buffers) {
    const bool grouped = s.scales == PK_SCALES_GROUP, is_block = is_block_format(p.format);
    const Block block = block_of(s.format);
    const int64_t source_row = grouped ? s.cols / 2 : s.cols / block.elements * block.bytes;
    const int64_t scale_row = grouped ? s.scale_cols : 0;
    uint8_t *out = reinterpret_cast<uint8_t *>(device);
    const int64_t stop = s.part_rows ? s.first_row + s.part_rows : s.rows;
    const bool is_last = stop == s.rows;
    if (s.first_row == 0)
        if (int32_t e = check(cudaMemsetAsync(out, 0, p.n_bytes, ctx->stream), "repack")) return e;
    const int64_t most = buffers.n_bytes / (source_row + scale_row) / 128 * 128;
    if (most < 128) return fail(PK_UNSUPPORTED, "repack: rows of %lld bytes are too long", (long long)source_row);
    const bool is_pinned = !grouped && lies_pinned(reinterpret_cast<const void *>(s.data));  // the device copies from there
    for (int64_t row = s.first_row, turn = 0; row < stop; row += most, ++turn) {
        const int i = turn & 1;
        const int64_t n = std::min(most, stop - row);
        const void *from = reinterpret_cast<const uint8_t *>(s.data) + (row - s.first_row) * source_row;
        if (!is_pinned) {
            if (int32_t e = check(cudaEventSynchronize(buffers.free[i]), "repack")) return e;
            copy_in_parts(buffers.host[i], static_cast<const uint8_t *>(from), n * source_row);
            from = buffers.host[i];
        }
        if (grouped) std::memcpy(static_cast<uint8_t *>(buffers.host[i]) + n * source_row, reinterpret_cast<const uint8_t *>(s.scale_data) + row * scale_row, n * scale_row);
        if (!is_block && s.format != PK_F32) {
            if (p.row_bytes == source_row) {
                if (int32_t e = check(cudaMemcpyAsync(out + row * p.row_bytes, from, n * source_row, cudaMemcpyHostToDevice, ctx->stream), "repack")) return e;
            } else if (int32_t e = check(cudaMemcpy2DAsync(out + row * p.row_bytes, p.row_bytes, from, source_row, source_row, n, cudaMemcpyHostToDevice, ctx->stream), "repack")) {
                return e;
            }
        } else {
            if (int32_t e = check(cudaMemcpyAsync(buffers.device[i], from, n * (source_row + scale_row), cudaMemcpyHostToDevice, ctx->stream), "repack")) return e;
            RepackArguments a = {};
            a.source = static_cast<const uint8_t *>(buffers.device[i]);
            a.group_scales = grouped ? a.source + n * source_row : nullptr;
            a.row_bytes = source_row;
            a.scale_cols = scale_row;
            a.n_rows = n;
            a.cols = s.cols;
            if (s.format == PK_Q4_Z) a.block_bytes = block.bytes;
            if (is_block) {
                int64_t unit = 0, bytes = 0;
                with_unit(p.format, [&](auto u) { unit = decltype(u)::kU; bytes = decltype(u)::kBytes; });
                a.out = out + row / 16 * (p.padded_cols / unit) * bytes;
                if (int32_t e = convert(p, a, round_up(n, 16), ctx->stream)) return e;
            } else {
                a.out = out + row * p.row_bytes;
                for (int64_t first = 0; first < n; first += 32768) {
                    RepackArguments part = a;
                    part.source += first * a.row_bytes;
                    part.out += first * p.row_bytes;
                    narrow_kernel<<<dim3((s.cols + 1023) / 1024, std::min<int64_t>(32768, n - first)), 256, 0, ctx->stream>>>(part, p.row_bytes);
                }
                if (int32_t e = check(cudaGetLastError(), "repack")) return e;
            }
        }
        if (int32_t e = check(cudaEventRecord(buffers.free[i], ctx->stream), "repack")) return e;
    }
    if (!is_last) return is_pinned ? check(cudaStreamSynchronize(ctx->stream), "repack") : PK_OK;
    // Four bytes from pageable memory are staged before the call returns.
    if (int32_t e = check(cudaMemcpyAsync(out + p.scale_at, &p.scale, 4, cudaMemcpyHostToDevice, ctx->stream), "repack")) return e;
    if (p.scale_kind == PK_SCALES_ROW) {
        if (int32_t e = check(cudaMemcpyAsync(out + p.scales, reinterpret_cast<const void *>(s.scale_data), s.rows * 4, cudaMemcpyHostToDevice, ctx->stream), "repack")) return e;
    } else if (p.scale_kind == PK_SCALES_BLOCK) {
        if (int32_t e = check(cudaMemcpy2DAsync(out + p.scales, p.scale_stride * 4, reinterpret_cast<const void *>(s.scale_data), s.scale_cols * 4, s.scale_cols * 4, s.scale_rows, cudaMemcpyHostToDevice, ctx->stream), "repack")) return e;
    }
    ctx->n_repacked_bytes += s.n_bytes;
    // The caller may reuse its memory when this returns; the pinned buffers hold all that is still in flight.
    return p.scale_kind == PK_SCALES_NONE && !is_pinned ? PK_OK : check(cudaStreamSynchronize(ctx->stream), "repack");
}

int32_t repack(pk_ctx *ctx, const pk_source &s, uint64_t address, const Packed &p, RepackBuffers &buffers) {
    cudaPointerAttributes found = {};
    if (int32_t e = check(cudaPointerGetAttributes(&found, reinterpret_cast<const void *>(address)), "repack")) return e;
    if (found.type != cudaMemoryTypeHost) return repack_on_device(ctx, s, address, p, buffers);
    if (buffers.whole_bytes < p.n_bytes) {
        if (int32_t e = check(cudaStreamSynchronize(ctx->stream), "repack")) return e;
        cudaFree(buffers.whole);
        buffers.whole = nullptr;
        buffers.whole_bytes = 0;
        if (int32_t e = check(cudaMalloc(&buffers.whole, p.n_bytes), "repack")) return e;
        buffers.whole_bytes = p.n_bytes;
        ctx->n_allocations += 1;
    }
    if (int32_t e = repack_on_device(ctx, s, reinterpret_cast<uint64_t>(buffers.whole), p, buffers)) return e;
    if (s.part_rows && s.first_row + s.part_rows < s.rows) return PK_OK;
    return check(cudaMemcpyAsync(reinterpret_cast<void *>(address), buffers.whole, p.n_bytes, cudaMemcpyDefault, ctx->stream), "repack");
}

}  // namespace pk
