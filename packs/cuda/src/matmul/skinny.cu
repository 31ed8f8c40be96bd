// Skinny matmul on Hopper: y[rows, N] = x[rows, K] W^T for 9 to 128 rows, at the speed of reading W.
//
// Weights stand on the M side of wgmma (A), rows of x on the N side (B, shared memory). A block takes tiles of kWg x kT x 64
// rows of W; the work of all tiles, cut along K into units, is dealt out evenly (stream-K, Osama et al. 2023): every block
// gets one run of units. It ends in a tile's middle: that tile's first block adds the others' parts, in order. One warp
// copies weights into a ring (BF16, FP8, F16: boxes of 64 rows x 128 bytes; block formats: whole units), one copies x,
// warpgroups multiply: BF16 from shared memory, everything else decoded to bf16 in registers. x goes to shared memory as rows
// of 128 bytes per 64 of K, swizzled, in the order in which a lane holds its weights: BF16 with up to 32 rows: two warps of
// each block bring it there from x itself; otherwise all blocks first make an image of x in global memory. Weights are asked for
// before the kernels ahead are done (programmatic dependent launch). FP8 blocks' scales multiply the accumulators, other scales
// the weights. With an activation block row 0 of a warpgroup is gate, 1 is up (kT = 2).
// One translation unit per format (PK_STREAM_FORMAT). Does not handle: more than 128 rows, blocks that do not all run at once.
#include "../../include/skinny.cuh"

#include "../../include/device.cuh"
#include "../../include/format/rows.cuh"
#include "../../include/format/unit.cuh"
#include "../../include/wgmma_skinny.cuh"

namespace pk {

#if defined(PK_WGMMA)
namespace {


constexpr int kSharedBytes = 232448 - 2048, kPitch = 20, kStagingBytes = 16 * kPitch * 4;

template <int kFormat, bool kBlock> struct Stage;
template <int kFormat> struct Stage<kFormat, true> {
    static constexpr int kU = Unit<kFormat>::kU, kTile64 = 4 * Unit<kFormat>::kBytes, kImage = 1;
};
template <int kFormat> struct Stage<kFormat, false> {
    static constexpr int kU = Rows<kFormat>::kU, kTile64 = 8192, kImage = kFormat == PK_BF16 ? 0 : Rows<kFormat>::kIsFp8 ? 2 : 3;
};
template <int kFormat> using StageOf = Stage<kFormat, is_block_format(kFormat)>;

template <int kFormat, int kNT, int kWg, int kT>
struct Shape {
    static constexpr int kM = 64 * kWg * kT, kXBytes = kNT * 128, kWBytes = kWg * kT * StageOf<kFormat>::kTile64, kWPitch = (kWBytes + 1023) / 1024 * 1024;
    static constexpr int kEpilogue = kWg * 4 * kT * kStagingBytes, kLeft = kSharedBytes - kEpilogue;
    static constexpr int kChunks = StageOf<kFormat>::kU / 64;
    // Chunks of x under way; the weights' ring takes what is left.
    static constexpr int kXLeast = kNT >= 128 ? 4 : kChunks + 2;
    // With few rows and many bytes a weight x is brought by threads that hold kFlight chunks of kItems x 16 elements in registers.
    static constexpr bool kDirect = kNT <= 32 && kFormat == PK_BF16;
    static constexpr int kLoaders = 64, kItems = kNT * 4 / kLoaders, kFlight = kNT == 16 ? 6 : 4;
    static constexpr int kWFit = (kLeft - kXLeast * kXBytes) / kWPitch, kWStages = kWFit > 12 ? 12 : kWFit;
    static constexpr int kXStages = (kLeft - kWStages * kWPitch) / kXBytes > 32 ? 32 : (kLeft - kWStages * kWPitch) / kXBytes;
    static constexpr int kBytes = kXStages * kXBytes + kWStages * kWPitch + kEpilogue + 1024;
    static constexpr int kThreads = kWg * 128 + 128;
    static_assert(kWStages >= 2 && kXStages >= 2 && kBytes + 16 * (kWStages + kXStages) + 64 <= 232448);
};

__device__ __forceinline__ uint4 shared_load4(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ void shared_store4(uint32_t at, uint4 v) { asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
template <int kWords>
__device__ __forceinline__ void shared_words(uint32_t *out, uint32_t at) {
    if constexpr (kWords % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kWords / 4; ++i) {
            uint4 v = shared_load4(at + 16 * i);
            out[4 * i] = v.x; out[4 * i + 1] = v.y; out[4 * i + 2] = v.z; out[4 * i + 3] = v.w;
        }
    } else if constexpr (kWords == 2) {
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(at));
    } else if constexpr (kWords == 1) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out[0]) : "r"(at));
    }
}

__device__ __forceinline__ int load_acquire(const int *p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_release(int *p, int v) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
template <int kThreads>
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// Rows of this launch; none when the step is another kernel's.
template <int kNT>
__device__ __forceinline__ int rows_here(const SkinnyArguments &a) {
    const int n = rows_of(a.info, a.rows_symbol);
    return n < a.min_rows || n > a.max_rows ? 0 : min(n - a.first_row, kNT);
}

// Sixteen slots of K of row n: piece q of a block of 64; zeros beyond x.
template <int kImage>
__device__ __forceinline__ void load_item(const SkinnyArguments &a, int n, int block, int q, int n_rows, uint2 (&v)[4]) {
    const bf16 *row = static_cast<const bf16 *>(a.x) + n * a.x_stride;
    if constexpr (kImage <= 1) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int k = block * 64 + 16 * q + 8 * c;
            uint4 p = make_uint4(0, 0, 0, 0);
            if (n < n_rows && k < a.k) p = __ldcg(reinterpret_cast<const uint4 *>(row + k));
            v[2 * c] = make_uint2(p.x, p.y);
            v[2 * c + 1] = make_uint2(p.z, p.w);
        }
    } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int k = kImage == 2 ? (block >> 1) * 128 + 32 * c + 4 * (4 * (block & 1) + q) : block * 64 + 16 * c + 4 * q;
            v[c] = make_uint2(0, 0);
            if (n < n_rows && k < a.k) v[c] = __ldcg(reinterpret_cast<const uint2 *>(row + k));
        }
    }
}
template <int kImage>
__device__ __forceinline__ void order_item(uint2 (&v)[4], uint4 &low, uint4 &high) {
    if (kImage == 2) {
#pragma unroll
        for (int c = 0; c < 4; ++c) v[c] = make_uint2(__byte_perm(v[c].x, v[c].y, 0x5410), __byte_perm(v[c].x, v[c].y, 0x7632));
    }
    low = kImage == 0 ? make_uint4(v[0].x, v[0].y, v[1].x, v[1].y) : make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
    high = kImage == 0 ? make_uint4(v[2].x, v[2].y, v[3].x, v[3].y) : make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
}

template <int kImage, int kNT>
__device__ __forceinline__ void make_image(const SkinnyArguments &a, int n_blocks64, int n_rows, int first, int stride) {
    for (int i = first; i < n_blocks64 * 4 * kNT; i += stride) {
        const int q = i & 3, n = (i >> 2) % kNT, block = (i >> 2) / kNT;
        uint2 v[4];
        uint4 low, high;
        load_item<kImage>(a, n, block, q, n_rows, v);
        order_item<kImage>(v, low, high);
        uint8_t *row = a.image + (static_cast<int64_t>(block) * kNT + n) * 128;
        *reinterpret_cast<uint4 *>(row + (((2 * q) ^ (n & 7)) << 4)) = low;
        *reinterpret_cast<uint4 *>(row + (((2 * q + 1) ^ (n & 7)) << 4)) = high;
    }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Constants in registers.
struct Opaque {
    uint32_t plus128, minus128, two23;
};

// One lane's part of 16 rows x kU of weights, read from shared memory as its chunks of 64 are needed.
template <int kFormat, bool kBlock> struct Part;
template <int kFormat> struct Part<kFormat, true> {
    using U = Unit<kFormat>;
    UnitRegisters<U> u;
    float d[2][4];  // of kBytesMin: factor and minus factor of the minimum, and -2^23 times each
    __device__ __forceinline__ void begin(uint32_t tile, int warp, int lane) {
        const uint32_t at = tile + warp * U::kBytes;
        if constexpr (U::kLow == 2) {
#pragma unroll
            for (int i = 0; i < U::kLowVectors; ++i) u.low[i] = shared_load4(at + 512 * i + 16 * lane);
        }
        if constexpr (U::kHighWords == 8) {
            shared_words<4>(u.high, at + U::kLowBytes + 16 * lane);
            shared_words<4>(u.high + 4, at + U::kLowBytes + 512 + 16 * lane);
        } else if constexpr (U::kHighWords > 0) {
            shared_words<U::kHighWords>(u.high, at + U::kLowBytes + 4 * U::kHighWords * lane);
        }
        shared_words<U::kScaleWords>(u.scale, at + U::kScaleAt + 4 * U::kScaleWords * (lane >> 2));
        if constexpr (U::kFactorWords > 0) shared_words<U::kFactorWords>(u.factor, at + U::kFactorAt + 4 * U::kFactorWords * (lane >> 2));
        if constexpr (U::kScale == Scale::kBytesMin) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                d[row][0] = half_at(u.factor[row], 0);
                d[row][1] = -half_at(u.factor[row], 1);
                d[row][2] = -8388608.0f * d[row][0];
                d[row][3] = -8388608.0f * d[row][1];
            }
        }
    }
    __device__ __forceinline__ void chunk(uint32_t tile, int warp, int lane, int i) {
        const uint32_t at = tile + warp * U::kBytes + 16 * lane;
        if constexpr (U::kLow == 4) u.low[i] = shared_load4(at + 512 * i);
        if constexpr (U::kLow == 8) {
            u.low[2 * i] = shared_load4(at + 1024 * i);
            u.low[2 * i + 1] = shared_load4(at + 1024 * i + 512);
        }
    }
    // Scale and negated minimum of group `group`, rows r and r + 8, as pairs.
    __device__ __forceinline__ void scales(int group, const Opaque &k, bf162 &s, bf162 &m) const {
        float s0, m0, s1, m1;
        if constexpr (U::kScale == Scale::kBytesMin) {
            const uint32_t *w = u.scale;
            s0 = fmaf(__uint_as_float(__byte_perm(w[group / 4], k.two23, 0x7540 | (group & 3))), d[0][0], d[0][2]);
            s1 = fmaf(__uint_as_float(__byte_perm(w[4 + group / 4], k.two23, 0x7540 | (group & 3))), d[1][0], d[1][2]);
            m0 = fmaf(__uint_as_float(__byte_perm(w[2 + group / 4], k.two23, 0x7540 | (group & 3))), d[0][1], d[0][3]);
            m1 = fmaf(__uint_as_float(__byte_perm(w[6 + group / 4], k.two23, 0x7540 | (group & 3))), d[1][1], d[1][3]);
            m = __floats2bfloat162_rn(m0, m1);
        } else {
            unit_scale<U>(u, group, 0, s0, m0);
            unit_scale<U>(u, group, 1, s1, m1);
            m = __floats2bfloat162_rn(-m0, -m1);
        }
        s = __floats2bfloat162_rn(s0, s1);
    }
    // Eight stored values as unit_codes gives them, in fewer instructions: constants that the assembler cannot see as such
    // let it choose one three-way instruction for "and" and "or".
    __device__ __forceinline__ void codes(int b, int row, const Opaque &k, uint32_t (&out)[4]) const {
        if constexpr (U::kCode == Code::kSigned8 || U::kCode == Code::kTable) {
            uint32_t w0, w1;
            if constexpr (U::kCode == Code::kSigned8) {
                w0 = word_of(u.low[b], 2 * row);
                w1 = word_of(u.low[b], 2 * row + 1);
            } else {
                const uint32_t w = word_of(u.low[b / 2], (b & 1) * 2 + row);
                w0 = table_bytes(w);
                w1 = table_bytes(w >> 16);
            }
            const uint32_t v[4] = {w0, w0 >> 8, w1, w1 >> 8};
#pragma unroll
            for (int i = 0; i < 4; ++i) out[i] = bits(__hadd2(as_bf162((v[i] & 0x007f007fu) | k.plus128), as_bf162((v[i] & 0x00800080u) | k.minus128)));
        } else if constexpr (U::kCode == Code::kUnsigned && U::kLow == 4) {
            const uint32_t low = word_of(u.low[b / 2], (b & 1) * 2 + row);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t v = ((low >> (4 * i)) & 0x000f000fu) | k.plus128;
                if constexpr (U::kHigh == 1) v |= shifted(u.high[row * (U::kHighWords / 2) + b / 4], (b & 3) * 4 + i - 4) & 0x00100010u;
                if constexpr (U::kHigh == 2) v |= shifted(u.high[row * 4 + b / 2], (b & 1) * 8 + 2 * i - 4) & 0x00300030u;
                out[i] = v;
            }
        } else {
            unit_codes<U>(u, b, row, out);
        }
    }
    // The A operands of two products: 32 of K.
    __device__ __forceinline__ void operands(int b, const Opaque &k, uint32_t (&lo)[4], uint32_t (&hi)[4]) const {
        codes(b, 0, k, lo);
        codes(b, 1, k, hi);
        constexpr int kParts = 32 / U::kGroup;
        const bf162 zero = __float2bfloat162_rn(-static_cast<float>(U::kBias));
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            bf162 s, m;
            scales(b * kParts + p, k, s, m);
            const bf162 sl = __low2bfloat162(s), sh = __high2bfloat162(s), ml = __low2bfloat162(m), mh = __high2bfloat162(m);
#pragma unroll
            for (int i = p * (4 / kParts); i < (p + 1) * (4 / kParts); ++i) {
                bf162 l = as_bf162(lo[i]), h = as_bf162(hi[i]);
                if constexpr (U::kBias != 0) {
                    l = __hadd2(l, zero);
                    h = __hadd2(h, zero);
                }
                lo[i] = bits(U::kHasMin ? __hfma2(l, sl, ml) : __hmul2(l, sl));
                hi[i] = bits(U::kHasMin ? __hfma2(h, sh, mh) : __hmul2(h, sh));
            }
        }
    }
};
template <int kFormat> struct Part<kFormat, false> {
    uint4 v[2][2];  // row, neighbouring pieces of 16 bytes
    __device__ __forceinline__ void begin(uint32_t tile, int warp, int lane) {
        const int r = lane >> 2, c = lane & 3;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int p = 0; p < 2; ++p) v[h][p] = shared_load4(tile + (16 * warp + r + 8 * h) * 128 + (((2 * c + p) ^ r) << 4));
    }
    __device__ __forceinline__ void chunk(uint32_t, int, int, int) {}
    __device__ __forceinline__ void widen(uint32_t w, uint32_t &even, uint32_t &odd) const {
        constexpr int kShift = kFormat == PK_FP8_E4M3 ? 4 : 5;
        const bf162 k = as_bf162(kFormat == PK_FP8_E4M3 ? 0x7b807b80u : 0x77807780u);
        even = bits(__hmul2(as_bf162(((w << 8) & 0x80008000u) | ((w << kShift) & (0x007f007fu << kShift))), k));
        odd = bits(__hmul2(as_bf162((w & 0x80008000u) | ((w >> (8 - kShift)) & (0x007f007fu << kShift))), k));
    }
    // FP8: block b (0 to 3) is products 2b and 2b + 1, a word a row each. F16: block b (0, 1) likewise, two words each; part 1 is what bf16 loses.
    template <int kPart>
    __device__ __forceinline__ void operands(int b, uint32_t (&lo)[4], uint32_t (&hi)[4]) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int product = 2 * b + j;
            if constexpr (Rows<kFormat>::kIsFp8) {
                widen(row_word(v[0][product / 4], product & 3), lo[2 * j], lo[2 * j + 1]);
                widen(row_word(v[1][product / 4], product & 3), hi[2 * j], hi[2 * j + 1]);
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    lo[2 * j + i] = half_part<kPart>(row_word(v[0][product / 2], 2 * (product & 1) + i));
                    hi[2 * j + i] = half_part<kPart>(row_word(v[1][product / 2], 2 * (product & 1) + i));
                }
            }
        }
    }
    template <int kPart>
    __device__ __forceinline__ static uint32_t half_part(uint32_t w) {
        const float2 f = __half22float2(*reinterpret_cast<__half2 *>(&w));
        const uint32_t near = pack_bf16(f.x, f.y);
        return kPart == 0 ? near : pack_bf16(f.x - low_f32(near), f.y - high_f32(near));
    }
};
#endif

template <int kFormat, int kNT, int kWg, int kT>
__global__ void __launch_bounds__(kWg * 128 + 128, 1) skinny_kernel(const __grid_constant__ SkinnyMaps maps, const __grid_constant__ SkinnyArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = Shape<kFormat, kNT, kWg, kT>;
    constexpr bool kBlock = is_block_format(kFormat), kIsFp8 = !kBlock && Rows<kFormat>::kIsFp8;
    constexpr int kConsumers = kWg * 128, kTile64 = StageOf<kFormat>::kTile64;
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t w_full[S::kWStages], w_empty[S::kWStages], x_full[S::kXStages], x_empty[S::kXStages];
    const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
    const uint32_t x_ring = base, w_ring = base + S::kXStages * S::kXBytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::kWStages; ++i) {
            barrier_init(w_full + i, 1);
            barrier_init(w_empty + i, 4 * kWg);
        }
        for (int i = 0; i < S::kXStages; ++i) {
            barrier_init(x_full + i, S::kDirect ? S::kLoaders / 32 : 1);
            barrier_init(x_empty + i, 4 * kWg);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    release_dependents();
    constexpr bool gated = kT == 2;  // the launch sees to it
    const int n_blocks = gridDim.x, me = blockIdx.x;
    const int64_t total = static_cast<int64_t>(a.n_tiles) * a.n_units;
    const int n_work = static_cast<int>(min(static_cast<int64_t>(n_blocks), total));  // blocks with units
    auto first_of = [&](int block) { return block < n_work ? total * block / n_work : total; };
    const int64_t begin = first_of(me), end = first_of(me + 1);
    // Blocks tell each other by the number of the launch, which each counts for itself; every launch has the same blocks.
    int *epoch = a.flags + me, *image_flags = a.flags + kMaxBlocks, *part_flags = a.flags + 2 * kMaxBlocks;  // of the first part and of the last
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    auto weight_of = [&](int tile) { return gated ? 0 : a.n_w > 2 && tile >= a.w[2].first_tile ? 2 : a.n_w > 1 && tile >= a.w[1].first_tile ? 1 : 0; };
    // First row of block row t of warpgroup g.
    auto row_of = [&](int tile, int i, int g, int t) { return gated ? tile * 64 * kWg + g * 64 : (tile - a.w[i].first_tile) * S::kM + (g * kT + t) * 64; };

    if (warp >= 4 * kWg) {
        fewer_registers<S::kDirect ? 104 : 40>();
        if (warp == 4 * kWg) {
            int stage = 0;
            uint32_t phase = 0;
            auto copy_unit = [&](int64_t at) {
                const int tile = static_cast<int>(at / a.n_units), u = static_cast<int>(at - static_cast<int64_t>(tile) * a.n_units), i = weight_of(tile);
                barrier_wait(w_empty + stage, phase ^ 1);
                if (lane == 0) barrier_expect(w_full + stage, S::kWBytes);
                __syncwarp();
                const uint32_t to = w_ring + stage * S::kWPitch;
                if constexpr (kBlock) {
                    if (lane < 4 * kWg * kT) {
                        const int q = lane >> 2, t = q % kT;
                        const SkinnyWeight &w = a.w[gated ? t : i];
                        const int tile16 = min(row_of(tile, i, q / kT, t) / 16 + (lane & 3), w.n_tiles16 - 1);
                        copy_bytes(to + lane * Unit<kFormat>::kBytes, w.data + (static_cast<int64_t>(tile16) * a.n_units + u) * Unit<kFormat>::kBytes, Unit<kFormat>::kBytes, w_full + stage);
                    }
                } else if (lane < kWg * kT) {
                    const int t = lane % kT;
                    copy_box_at(to + lane * 8192, maps.w + (gated ? t : i), u * StageOf<kFormat>::kU, row_of(tile, i, lane / kT, t), w_full + stage);
                }
                if (++stage == S::kWStages) {
                    stage = 0;
                    phase ^= 1;
                }
            };
            // Weights do not depend on the kernels before: the ring is filled while those still run, unless this launch may be idle.
            int64_t at = begin;
            if (a.min_rows == 0 && a.first_row == 0)
                for (; at < end && at < begin + S::kWStages; ++at) copy_unit(at);
            wait_dependence();
            if (rows_here<kNT>(a) <= 0) {
                for (int i = 0; i < at - begin; ++i) barrier_wait(w_full + i, 0);
                return;
            }
            for (; at < end; ++at) copy_unit(at);
            return;
        }
        const int n_chunks = static_cast<int>(end - begin) * S::kChunks, first_chunk = static_cast<int>(begin % a.n_units) * S::kChunks, per_tile = a.n_units * S::kChunks;
        wait_dependence();
        if constexpr (S::kDirect) {
            if (warp < 4 * kWg + 2) return;
            const int n_rows = rows_here<kNT>(a), thread = threadIdx.x - kConsumers - 64;
            if (n_rows <= 0) return;
            uint2 v[S::kFlight][S::kItems][4];
            auto load = [&](uint2(&to)[S::kItems][4], int chunk) {
                const int block = (first_chunk + chunk) % per_tile;
#pragma unroll
                for (int i = 0; i < S::kItems; ++i) load_item<StageOf<kFormat>::kImage>(a, (thread >> 2) + 16 * i, block, thread & 3, n_rows, to[i]);
            };
#pragma unroll
            for (int d = 0; d < S::kFlight; ++d)
                if (d < n_chunks) load(v[d], d);
            int stage = 0;
            uint32_t phase = 0;
            for (int base_chunk = 0; base_chunk < n_chunks; base_chunk += S::kFlight) {
#pragma unroll
                for (int d = 0; d < S::kFlight; ++d) {
                    const int chunk = base_chunk + d;
                    if (chunk >= n_chunks) break;
                    barrier_wait(x_empty + stage, phase ^ 1);
#pragma unroll
                    for (int i = 0; i < S::kItems; ++i) {
                        const int n = (thread >> 2) + 16 * i, q = thread & 3;
                        uint4 low, high;
                        order_item<StageOf<kFormat>::kImage>(v[d][i], low, high);
                        const uint32_t row = x_ring + stage * S::kXBytes + n * 128;
                        shared_store4(row + (((2 * q) ^ (n & 7)) << 4), low);
                        shared_store4(row + (((2 * q + 1) ^ (n & 7)) << 4), high);
                    }
                    fence_async_proxy();
                    __syncwarp();
                    if (lane == 0) barrier_arrive(x_full + stage);
                    if (chunk + S::kFlight < n_chunks) load(v[d], chunk + S::kFlight);
                    if (++stage == S::kXStages) {
                        stage = 0;
                        phase ^= 1;
                    }
                }
            }
        } else {
            if (warp != 4 * kWg + 1 || rows_here<kNT>(a) <= 0) return;
            const int now = __ldcg(epoch) + 1;
            for (int i = lane; i < n_blocks; i += 32)
                while (load_acquire(image_flags + i) != now) {}
            __syncwarp();
            asm volatile("fence.proxy.async;" ::: "memory");
            if (lane != 0) return;
            int stage = 0;
            uint32_t phase = 0;
            for (int chunk = 0; chunk < n_chunks; ++chunk) {
                barrier_wait(x_empty + stage, phase ^ 1);
                barrier_expect(x_full + stage, S::kXBytes);
                copy_bytes(x_ring + stage * S::kXBytes, a.image + static_cast<int64_t>((first_chunk + chunk) % per_tile) * S::kXBytes, S::kXBytes, x_full + stage);
                if (++stage == S::kXStages) {
                    stage = 0;
                    phase ^= 1;
                }
            }
        }
        return;
    }
    more_registers<S::kDirect ? 200 : 232>();
    wait_dependence();
    const int n_rows = rows_here<kNT>(a);
    if (n_rows <= 0) return;
    const int now = __ldcg(epoch) + 1;
    if constexpr (!S::kDirect) {
        make_image<StageOf<kFormat>::kImage, kNT>(a, a.n_units * S::kChunks, n_rows, me * kConsumers + threadIdx.x, n_blocks * kConsumers);
        __threadfence();
        asm volatile("fence.proxy.async;" ::: "memory");
        consumers_sync<kConsumers>();
        if (threadIdx.x == 0) store_release(image_flags + me, now);
    }
    const int g = warp >> 2, in = warp & 3;
    const uint32_t nothing = gridDim.y - 1;  // zero, which the compiler does not know
    const Opaque constants = {0x43004300u + nothing, 0xc300c300u + nothing, 0x4b000000u + nothing};
    float *staging = reinterpret_cast<float *>(raw + (base - shared_address(raw)) + S::kXStages * S::kXBytes + S::kWStages * S::kWPitch) + warp * kT * 16 * kPitch;
    int w_stage = 0, x_stage = 0, x_held = -1, w_held = -1;
    uint32_t w_phase = 0, x_phase = 0;
    auto release = [&](uint64_t *barrier) {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    };
    // What is added to a piece, asked for ahead of its sums.
    auto load_old = [&](int tile, int g, int in, int chunk, float(&old)[8]) {
        const SkinnyWeight &w = a.w[weight_of(tile)];
        const int row = row_of(tile, weight_of(tile), g, 0) + in * 16 + (lane & 15);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const int n = chunk * 16 + (lane >> 4) + 2 * r;
            const int64_t at = n * a.add_stride + w.first_column + row;
            old[r] = 0.0f;
            if (a.add != nullptr && n < n_rows && row < w.rows) old[r] = a.add_format == PK_F32 ? static_cast<const float *>(a.add)[at] : __bfloat162float(static_cast<const bf16 *>(a.add)[at]);
        }
    };
    // Stores 16 rows of every block row times 16 rows of x: the sums v of warp `in` of warpgroup `g`, through shared memory, so that
    // lanes store neighbouring columns.
    auto write_piece = [&](int tile, int g, int in, int chunk, const float(&v)[kT][8], const float(&old)[8]) {
        const int i = weight_of(tile);
        __syncwarp();
#pragma unroll
        for (int t = 0; t < kT; ++t)
#pragma unroll
            for (int e = 0; e < 8; ++e) staging[t * 16 * kPitch + (8 * (e >> 2) + 2 * (lane & 3) + (e & 1)) * kPitch + (lane >> 2) + 8 * ((e >> 1) & 1)] = v[t][e];
        __syncwarp();
        const int n0 = chunk * 16 + (lane >> 4);
        const SkinnyWeight &w = a.w[i];
        const int row = row_of(tile, i, g, 0) + in * 16 + (lane & 15);
        if (row >= w.rows) return;
        const float f0 = w.scale * (w.row_scale ? w.row_scale[row] : 1.0f), b0 = w.bias ? w.bias[row] : 0.0f;
        const float *from = staging + (lane >> 4) * kPitch + (lane & 15);
        const int64_t column = w.first_column + row;
        if (!gated && a.act == PK_ACT_NONE) {
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                const int n = n0 + 2 * r;
                float out = (from[2 * r * kPitch] * f0 + b0) * a.scale;
                if (a.softcap > 0.0f) out = a.softcap * quick_tanh(out / a.softcap);
                out += old[r];
                if (n >= n_rows) continue;
                if (a.y_format == PK_F32) static_cast<float *>(a.y)[n * a.y_stride + column] = out;
                else static_cast<bf16 *>(a.y)[n * a.y_stride + column] = __float2bfloat16(out);
            }
            return;
        }
        const float f1 = gated ? a.w[1].scale * (a.w[1].row_scale ? a.w[1].row_scale[row] : 1.0f) : 0.0f, b1 = gated && a.w[1].bias ? a.w[1].bias[row] : 0.0f;
        const float *twin = from + (kT - 1) * 16 * kPitch;
        if (gated && a.act == PK_ACT_SILU && a.softcap <= 0.0f && a.add == nullptr && a.y_format == PK_BF16) {
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                const float gate = from[2 * r * kPitch] * f0 + b0, up = twin[2 * r * kPitch] * f1 + b1;
                if (n0 + 2 * r < n_rows) static_cast<bf16 *>(a.y)[(n0 + 2 * r) * a.y_stride + column] = __float2bfloat16(__fdividef(gate, 1.0f + __expf(-gate)) * up * a.scale);
            }
            return;
        }
#pragma unroll 1
        for (int r = 0; r < 8 && n0 + 2 * r < n_rows; ++r) {
            const int n = n0 + 2 * r;
            const float more = a.add != nullptr ? load_as_f32(a.add, n * a.add_stride + column, a.add_format) : 0.0f;
            const float own = from[2 * r * kPitch] * f0 + b0;
            float out = activate(gated ? own : more, a.act) * (gated ? twin[2 * r * kPitch] * f1 + b1 : own) * a.scale;
            if (a.softcap > 0.0f) out = a.softcap * quick_tanh(out / a.softcap);
            store_from_f32(a.y, n * a.y_stride + column, a.y_format, gated ? out + more : out);
        }
    };
    float acc[kT][kNT / 2];
    auto hold = [&] {
#pragma unroll
        for (int t = 0; t < kT; ++t)
#pragma unroll
            for (int j = 0; j < kNT / 2; ++j) asm volatile("" : "+f"(acc[t][j])::"memory");
    };
    for (int64_t at = begin; at < end;) {
        const int tile = static_cast<int>(at / a.n_units), u0 = static_cast<int>(at - static_cast<int64_t>(tile) * a.n_units);
        const int u1 = static_cast<int>(min(static_cast<int64_t>(a.n_units), u0 + (end - at))), i = weight_of(tile);
        float unit_scales[kT];  // of the FP8 blocks that the accumulators are in
#pragma unroll
        for (int t = 0; t < kT; ++t) {
            unit_scales[t] = 1.0f;
#pragma unroll
            for (int j = 0; j < kNT / 2; ++j) acc[t][j] = 0.0f;
        }
        for (int u = u0; u < u1; ++u) {
            float next_scales[kT];
            if constexpr (kIsFp8) {
#pragma unroll
                for (int t = 0; t < kT; ++t) {
                    const SkinnyWeight &w = a.w[gated ? t : i];
                    next_scales[t] = w.block_scale ? __ldg(w.block_scale + (min(row_of(tile, i, g, t), w.rows - 1) >> 7) * w.block_stride + u) : 1.0f;
                }
            }
            barrier_wait(w_full + w_stage, w_phase);
            const uint32_t w_at = w_ring + w_stage * S::kWPitch + g * kT * kTile64;
            if constexpr (kFormat == PK_BF16) {
                barrier_wait(x_full + x_stage, x_phase);
                const uint32_t x_at = x_ring + x_stage * S::kXBytes;
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int t = 0; t < kT; ++t) Wgmma<kNT>::shared(acc[t], matrix_descriptor(w_at + t * 8192 + 32 * k), matrix_descriptor(x_at + 32 * k), 1);
                wgmma_commit();
                wgmma_wait<1>();
                if (w_held >= 0) {
                    release(w_empty + w_held);
                    release(x_empty + x_held);
                }
                w_held = w_stage;
                x_held = x_stage;
                if (++x_stage == S::kXStages) {
                    x_stage = 0;
                    x_phase ^= 1;
                }
            } else {
                Part<kFormat, kBlock> part[kT];
#pragma unroll
                for (int t = 0; t < kT; ++t) part[t].begin(w_at + t * kTile64, in, lane);
                if constexpr (kIsFp8) {
                    wgmma_wait<0>();
                    hold();
#pragma unroll
                    for (int t = 0; t < kT; ++t) {
                        if (next_scales[t] == 0.0f) next_scales[t] = 1e-30f;
                        const float f = __fdividef(unit_scales[t], next_scales[t]);
                        unit_scales[t] = next_scales[t];
#pragma unroll
                        for (int j = 0; j < kNT / 2; ++j) acc[t][j] *= f;
                    }
                }
#pragma unroll
                for (int chunk = 0; chunk < S::kChunks; ++chunk) {
#pragma unroll
                    for (int t = 0; t < kT; ++t) part[t].chunk(w_at + t * kTile64, in, lane, chunk);
                    barrier_wait(x_full + x_stage, x_phase);
                    // The low words of descriptors: only they change.
                    const uint32_t x_low = (((x_ring + x_stage * S::kXBytes) & 0x3ffff) >> 4) | 0x10000;
                    auto x_at = [&](int k) { return (uint64_t{0x40000040} << 32) | (x_low + 2 * k); };
#pragma unroll
                    for (int b = 0; b < 2; ++b)
#pragma unroll
                        for (int t = 0; t < kT; ++t) {
                            uint32_t lo[4], hi[4];
                            if constexpr (kBlock) part[t].operands(2 * chunk + b, constants, lo, hi);
                            else part[t].template operands<0>(2 * chunk + b, lo, hi);
                            wgmma_fence();
                            Wgmma<kNT>::registers(acc[t], lo[0], hi[0], lo[1], hi[1], x_at(2 * b));
                            Wgmma<kNT>::registers(acc[t], lo[2], hi[2], lo[3], hi[3], x_at(2 * b + 1));
                            if constexpr (kFormat == PK_F16) {
                                uint32_t lo2[4], hi2[4];
                                part[t].template operands<1>(2 * chunk + b, lo2, hi2);
                                wgmma_fence();
                                Wgmma<kNT>::registers(acc[t], lo2[0], hi2[0], lo2[1], hi2[1], x_at(2 * b));
                                Wgmma<kNT>::registers(acc[t], lo2[2], hi2[2], lo2[3], hi2[3], x_at(2 * b + 1));
                            }
                            wgmma_commit();
                            wgmma_wait<1>();
                            if (b == 0 && t == kT - 1 && x_held >= 0) release(x_empty + x_held);
                        }
                    x_held = x_stage;
                    if (++x_stage == S::kXStages) {
                        x_stage = 0;
                        x_phase ^= 1;
                    }
                }
                release(w_empty + w_stage);
            }
            if (++w_stage == S::kWStages) {
                w_stage = 0;
                w_phase ^= 1;
            }
        }
        wgmma_wait<0>();
        hold();
        release(x_empty + x_held);
        x_held = -1;
        if constexpr (kFormat == PK_BF16) {
            release(w_empty + w_held);
            w_held = -1;
        }
        at += u1 - u0;
        if constexpr (kIsFp8) {
#pragma unroll
            for (int t = 0; t < kT; ++t)
#pragma unroll
                for (int j = 0; j < kNT / 2; ++j) acc[t][j] *= unit_scales[t];
        }
        if (u0 > 0 || u1 < a.n_units) {
            // A part of a tile: laid down for whoever adds it up.
            float4 *mine = reinterpret_cast<float4 *>(a.partial + (2 * me + (u0 == 0)) * static_cast<int64_t>(S::kM * kNT)) + threadIdx.x;
#pragma unroll
            for (int t = 0; t < kT; ++t)
#pragma unroll
                for (int j = 0; j < kNT / 8; ++j) __stcg(mine + (t * (kNT / 8) + j) * kConsumers, make_float4(acc[t][4 * j], acc[t][4 * j + 1], acc[t][4 * j + 2], acc[t][4 * j + 3]));
            consumers_sync<kConsumers>();
            if (threadIdx.x == 0) store_release(part_flags + 2 * me + (u0 == 0), now);
            continue;
        }
        // Sixteen rows of x at a time through shared memory, so that lanes store neighbouring columns and one copy of the code serves all.
#pragma unroll 1
        for (int chunk = 0; chunk < kNT / 16; ++chunk) {
            if (chunk * 16 >= n_rows) break;
            float v[kT][8], old[8];
            if constexpr (!gated) load_old(tile, g, in, chunk, old);
#pragma unroll
            for (int c = 0; c < kNT / 16; ++c)
                if (c == chunk)
#pragma unroll
                    for (int t = 0; t < kT; ++t)
#pragma unroll
                        for (int e = 0; e < 8; ++e) v[t][e] = acc[t][8 * c + e];
            write_piece(tile, g, in, chunk, v, old);
        }
    }
    // The tiles that other blocks share (the first, the last): the blocks of a tile deal its pieces of 16 rows of W (or of both) and 16
    // of x among their warps, and add the parts in order.
    int shared_tile[2], owner[2], n_parts[2] = {0, 0};
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const int64_t tile64 = which == 0 ? begin / a.n_units : (end - 1) / a.n_units, first = tile64 * a.n_units, last = first + a.n_units;
        shared_tile[which] = static_cast<int>(tile64);
        owner[which] = static_cast<int>(first * n_work / total);
        if (begin >= end || (begin <= first && end >= last) || (which == 1 && tile64 == begin / a.n_units)) continue;
        while (first_of(owner[which] + 1) <= first) ++owner[which];
        while (first_of(owner[which]) > first) --owner[which];
        n_parts[which] = 1;
        while (owner[which] + n_parts[which] < n_work && first_of(owner[which] + n_parts[which]) < last) ++n_parts[which];
    }
    for (int which = 0; which < 2; ++which)
        for (int i = threadIdx.x; i < n_parts[which]; i += kConsumers)
            while (load_acquire(part_flags + 2 * (owner[which] + i) + (i == 0)) != now) {}
    if (n_parts[0] + n_parts[1] > 0) consumers_sync<kConsumers>();
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
        constexpr int kPieces = kWg * 4 * (kNT / 16);
        const int tile = shared_tile[which], parts = n_parts[which];
        if (parts == 0) continue;
        for (int piece = warp + (me - owner[which]) * 4 * kWg; piece < kPieces; piece += parts * 4 * kWg) {
            const int pw = piece % (4 * kWg), chunk = piece / (4 * kWg);
            if (chunk * 16 >= n_rows) break;
            float v[kT][8] = {}, old[8];
            if constexpr (!gated) load_old(tile, pw >> 2, pw & 3, chunk, old);
#pragma unroll 4
            for (int part = 0; part < parts; ++part) {
                const float4 *from = reinterpret_cast<const float4 *>(a.partial + (2 * (owner[which] + part) + (part == 0)) * static_cast<int64_t>(S::kM * kNT)) + pw * 32 + lane;
#pragma unroll
                for (int t = 0; t < kT; ++t)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float4 p = __ldcg(from + (t * (kNT / 8) + 2 * chunk + j) * kConsumers);
                        v[t][4 * j] += p.x; v[t][4 * j + 1] += p.y; v[t][4 * j + 2] += p.z; v[t][4 * j + 3] += p.w;
                    }
            }
            write_piece(tile, pw >> 2, pw & 3, chunk, v, old);
        }
    }
    if (threadIdx.x == 0) *epoch = now;
#endif
}

template <int kFormat, int kNT, int kWg, int kT>
int32_t launch_shape(const Launch &l, SkinnyArguments a, const Packed *const *packed) {
    using S = Shape<kFormat, kNT, kWg, kT>;
    constexpr bool gated = kT == 2;
    SkinnyMaps maps = {};
    a.n_units = static_cast<int32_t>(packed[0]->padded_cols / StageOf<kFormat>::kU);
    a.n_tiles = 0;
    const int height = gated ? S::kM / 2 : S::kM;
    for (int i = 0; i < a.n_w; ++i) {
        SkinnyWeight &w = a.w[i];
        w.first_tile = gated ? 0 : a.n_tiles;
        if (!gated || i == 0) a.n_tiles += (w.rows + height - 1) / height;
        if constexpr (!is_block_format(kFormat)) {
            const bool wide = !Rows<kFormat>::kIsFp8;
            const cuuint64_t size[2] = {static_cast<cuuint64_t>(packed[i]->padded_cols), static_cast<cuuint64_t>(packed[i]->padded_rows)}, stride[1] = {static_cast<cuuint64_t>(packed[i]->row_bytes)};
            const cuuint32_t box[2] = {wide ? 64u : 128u, 64u}, step[2] = {1, 1};
            const CUresult e = l.ctx->driver.encode_tiled(&maps.w[i], wide ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t *>(w.data), size, stride, box, step,
                                                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
            if (e != CUDA_SUCCESS) return fail(PK_DEVICE, "matmul: tensor map of weight %d: CUDA driver error %d", i, static_cast<int>(e));
        }
    }
    if (l.ctx->n_processors > kMaxBlocks) return fail(PK_UNSUPPORTED, "matmul: %d multiprocessors; the CUDA pack counts up to %d", l.ctx->n_processors, kMaxBlocks);
    Launch own = l;
    own.overlap = true;
    return launch(own, "skinny", skinny_kernel<kFormat, kNT, kWg, kT>, dim3(l.ctx->n_processors), dim3(S::kThreads), S::kBytes, maps, a);
}

// Moves x, y and add to the first row of the launch.
void move_rows(SkinnyArguments &a) {
    auto at = [&](const void *p, int64_t stride, int32_t format) { return p ? static_cast<const uint8_t *>(p) + a.first_row * stride * (format == PK_F32 ? 4 : 2) : nullptr; };
    a.x = at(a.x, a.x_stride, PK_BF16);
    a.y = const_cast<uint8_t *>(at(a.y, a.y_stride, a.y_format));
    a.add = at(a.add, a.add_stride, a.add_format);
}

template <int kFormat, int kNT>
int32_t launch_width(const Launch &l, const SkinnyArguments &a, const Packed *const *packed) {
    if (a.act != PK_ACT_NONE && a.n_w == 2) return launch_shape<kFormat, kNT, 2, 2>(l, a, packed);
    return launch_shape<kFormat, kNT, 2, 1>(l, a, packed);
}

}  // namespace

template <int kFormat>
int32_t launch_skinny(const Launch &l, SkinnyArguments a, const Packed *const *packed, int64_t max_rows) {
    move_rows(a);
    max_rows -= a.first_row;
    // Seldom formats have half the widths: an instance takes seconds to compile.
    constexpr bool kAll = kFormat == PK_BF16 || kFormat == PK_FP8_E4M3 || kFormat == PK_Q8_0 || kFormat == PK_Q4_K || kFormat == PK_Q6_K;
    if constexpr (kAll) {
        if (max_rows <= 16) return launch_width<kFormat, 16>(l, a, packed);
    }
    if (max_rows <= 32) return launch_width<kFormat, 32>(l, a, packed);
    if constexpr (kAll) {
        if (max_rows <= 64) return launch_width<kFormat, 64>(l, a, packed);
    }
    return launch_width<kFormat, 128>(l, a, packed);
}

#else

template <int kFormat>
int32_t launch_skinny(const Launch &, SkinnyArguments, const Packed *const *, int64_t) { return fail(PK_UNSUPPORTED, "matmul: no wgmma on this architecture"); }

#endif

template int32_t launch_skinny<PK_STREAM_FORMAT>(const Launch &, SkinnyArguments, const Packed *const *, int64_t);

}  // namespace pk
