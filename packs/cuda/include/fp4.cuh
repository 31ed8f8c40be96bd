// Products of e2m1 with a scale per block (sm_120, sm_121: mma.sync ... block_scale), and what they read. UNVALIDATED: nobody has run
// the instruction on such a card; with PK_FP4_EMULATED its place is taken by products in bf16 that give the same sums (of numbers
// that bf16 holds exactly), so that everything around it runs on any card.
//
// A row of an operand is its codes (two a byte, the lower nibble first), then its scales (one a block of kBlock): MXFP4's are ue8m0 of
// 32, NVFP4's ue4m3 of 16. K is padded to 128 with zeros. x is the sum of kTerms such numbers, 128 of K of each in turns: one alone
// loses a tenth of x by norm, two lose 0.9 % (NVFP4) or 1.4 to 2 % (MXFP4), where e4m3 with a scale of 128 loses 2.2 to 2.6 %.
//
// Registers of the instruction (PTX ISA 9.0, 9.7.14.5.14): with g = lane / 4 and t = lane % 4, a0 holds row g, k 8t to 8t + 7; a1 row
// g + 8; a2, a3 the same with 32 added to k; b0, b1 column g likewise. The scales of A's row g lie in lane 4g, of row g + 8 in lane
// 4g + 1, of B's column g in lane 4g; block i of the 64 is byte i.
#pragma once
#include "device.cuh"
#include "format/unit.cuh"

namespace pk {

#if defined(PK_FP4_MMA) || defined(PK_FP4_EMULATED)
constexpr bool kFp4Built = true;
#else
constexpr bool kFp4Built = false;
#endif
constexpr int kTerms = 2;

template <int kFormat>
struct Fp4 {
    static constexpr bool kIsMx = kFormat == PK_MXFP4;
    static constexpr int kBlock = kIsMx ? 32 : 16, kScaleBytes = 128 / kBlock;  // of 128 of K
};

inline bool is_fp4(int32_t format) { return format == PK_MXFP4 || format == PK_NVFP4; }
// Bytes of a row of K columns: codes and scales, as whole pieces of 16.
inline int64_t fp4_row_bytes(int32_t format, int64_t padded, int terms) {
    return (padded / 128 * terms * (64 + (format == PK_MXFP4 ? 4 : 8)) + 15) / 16 * 16;
}

// In packs built for sm_120, where the context tries kernels that never ran.
bool has_fp4_mma(const pk_ctx *ctx);

// x (F32 or BF16) as fp4_row_bytes(.., kTerms) a row, and a factor of each row. per_token: rows of x a row of the step.
struct NarrowFp4 {
    const void *x;
    uint8_t *out;
    float *factors;
    const StepInfo *info;
    int64_t x_stride, row_bytes, rows_symbol;
    int32_t x_format, k, min_rows, is_wide, per_token;
};
int32_t launch_narrow_fp4(const Launch &l, int32_t format, NarrowFp4 a, int64_t max_rows);

// Rows first_row and on of packed weights as rows of one term.
int32_t launch_unpack_fp4(const Launch &l, const Packed &packed, uint64_t data, int64_t first_row, int64_t n_rows, void *out, int64_t row_bytes);

__device__ __forceinline__ float e2m1_to_f32(uint32_t code) {
    // f32's exponent counts from 127 where e2m1's counts from 1.
    return __uint_as_float((code & 7u) << 22 | (code & 8u) << 28) * 0x1p126f;
}
__device__ __forceinline__ float fp4_scale(bool is_mx, uint32_t code) {
    if (!is_mx) return e4m3_to_f32(static_cast<uint8_t>(code));
    return code == 255u ? __uint_as_float(0x7fffffffu) : __uint_as_float(code ? code << 23 : 0x00400000u);
}

// Block c of 32 codes in order, of row r (half 0) or r + 8 of a unit that lies in the registers of a warp; c: lane % 4. Nibbles of a word
// of the unit come in the order 0 2 4 6 1 3 5 7; its lower half is elements 4c to 4c + 3 of a block, the upper 16 + 4c and on.
template <class U>
__device__ __forceinline__ uint4 fp4_block(const UnitRegisters<U> &u, int half) {
    static_assert(U::kU == 128 && U::kLowVectors == 2);
    const int c = threadIdx.x & 3;
    uint32_t word[4], quarter[4];  // quarter[d]: what lane d of the four holds of block c
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        const uint32_t w = word_of(u.low[b / 2], (b & 1) * 2 + half);
        word[b] = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) word[b] |= (w >> (4 * (i / 2 + 4 * (i & 1))) & 15u) << (4 * i);
    }
#pragma unroll
    for (int d = 0; d < 4; ++d) {
        // In round d a lane gives the block of the lane it exchanges with.
        const int other = c ^ d;
        const uint32_t mine = other == 0 ? word[0] : other == 1 ? word[1] : other == 2 ? word[2] : word[3];
        const uint32_t got = __shfl_xor_sync(~0u, mine, d);
        if (other == 0) quarter[0] = got;
        else if (other == 1) quarter[1] = got;
        else if (other == 2) quarter[2] = got;
        else quarter[3] = got;
    }
    return make_uint4(__byte_perm(quarter[0], quarter[1], 0x5410), __byte_perm(quarter[2], quarter[3], 0x5410), __byte_perm(quarter[0], quarter[1], 0x7632), __byte_perm(quarter[2], quarter[3], 0x7632));
}
// Four of the scales of that row, in order; c below scale bytes / 4.
template <int kFormat>
__device__ __forceinline__ uint32_t fp4_scales(const UnitRegisters<Unit<kFormat>> &u, int half, int c) {
    const uint32_t word = u.scale[half * (Unit<kFormat>::kRowScaleBytes / 4) + c];
    return kFormat == PK_NVFP4 ? word & 0x7f7f7f7fu : word;
}

#if defined(PK_FP4_EMULATED)
// Pairs of codes 4j to 4j + 3 of a register, times their scale.
__device__ __forceinline__ void fp4_pairs(uint32_t codes, int j, float scale, uint32_t &first, uint32_t &second) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = e2m1_to_f32(codes >> (16 * j + 4 * i)) * scale;
    first = pack_bf16(v[0], v[1]);
    second = pack_bf16(v[2], v[3]);
}
#endif

// d[16, 8] += a[16, 64] b[64, 8], with the scales of a and b.
template <int kFormat>
__device__ __forceinline__ void mma_e2m1(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t a_scales, uint32_t b_scales) {
#if defined(PK_FP4_EMULATED)
    const int lane = threadIdx.x & 31, t = lane & 3;
    const uint32_t rows[2] = {__shfl_sync(~0u, a_scales, lane & ~3), __shfl_sync(~0u, a_scales, (lane & ~3) | 1)}, column = __shfl_sync(~0u, b_scales, lane & ~3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int block = Fp4<kFormat>::kIsMx ? half : 2 * half + (t >> 1);
        auto scale = [&](uint32_t word) { return fp4_scale(Fp4<kFormat>::kIsMx, word >> (8 * block) & 255u); };
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            uint32_t p[4], q[2];
            fp4_pairs(a[2 * half], j, scale(rows[0]), p[0], p[2]);
            fp4_pairs(a[2 * half + 1], j, scale(rows[1]), p[1], p[3]);
            fp4_pairs(half ? b1 : b0, j, scale(column), q[0], q[1]);
            mma_bf16(d, p[0], p[1], p[2], p[3], q[0], q[1]);
        }
    }
#elif defined(PK_FP4_MMA)
    if constexpr (Fp4<kFormat>::kIsMx)
        asm volatile("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12,%12}, {%11}, {%12,%12};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(a_scales), "r"(b_scales), "n"(0));
    else
        asm volatile("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12,%12}, {%11}, {%12,%12};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(a_scales), "r"(b_scales), "n"(0));
#endif
}

template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t shared, const void *global, bool is_valid) {
    int n = is_valid ? kBytes : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes), "r"(n) : "memory");
}

}  // namespace pk
