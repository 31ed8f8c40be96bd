// x of a phase into shared memory, normed on the way, in the order and precision that the weights' format wants.
//
// Row-major formats: rows x_row_bytes apart, behind them a factor a chunk (FP8). Integers: per 32 elements and row a scale and two bytes an element (high, low), laid out as
// [block of 32][row][part][lane % 4][8 bytes], which are the B operand of mma m16n8k32; behind them [block][row] (scale,
// sum of the first 16, of the second 16, of squares where x came folded).
#pragma once
#include "fold.cuh"

namespace pk::persist {

// When a block's first thread that multiplies, or that writes, or sends, came by, for bench/persist_chain.cu and bench.persist_trace: [phases][blocks][kMarks], behind them a block's own. Low
// words of the device's time in nanoseconds: multiprocessors have clocks of their own, which go differently.
constexpr int kMarks = 10;
enum BlockMark { kBegun = 0, kEnded = 1, kEntered = 2, kKnown = 3 };
#ifdef PK_PERSIST_TRACE
__constant__ long long *trace_room = nullptr;
__device__ __forceinline__ void put_mark(int phase, int at, long long value) { trace_room[(phase * gridDim.x + blockIdx.x) * kMarks + at] = value; }
__device__ __forceinline__ uint32_t device_time() {
    uint32_t now;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now));
    return now;
}
#endif
__device__ __forceinline__ void mark(int phase, int at, int thread = 0) {
#ifdef PK_PERSIST_TRACE
    if (trace_room && thread_here() == thread) put_mark(phase, at, device_time());
#endif
}

// A block's own, by one thread.
__device__ __forceinline__ void mark_block(const Arguments &a, BlockMark at) {
#ifdef PK_PERSIST_TRACE
    if (trace_room) put_mark(a.n_phases, at, device_time());
#endif
}

// Where a packet of element `at` lies, and whose it is.
template <bool kF32>
__device__ __forceinline__ const uint8_t *packet_at(uint64_t packets, int64_t at) { return reinterpret_cast<const uint8_t *>(packets) + at * (kF32 ? 8 : 4); }
__device__ __forceinline__ uint2 await_packet(const uint8_t *from, uint32_t epoch) {
    uint2 w;
    do w = load_packet(from);
    while (w.y != epoch);
    return w;
}

// The packet of an operand's element.
__device__ __forceinline__ const uint8_t *added_at(const Place &p, int64_t at) { return reinterpret_cast<const uint8_t *>(p.packets) + (p.format == PK_F32 ? at * 8 : at / 2 * 8); }

// Writes an element to memory and to whoever waits for it. All lanes of a warp call it, with neighbours side by side.
__device__ __forceinline__ void write_output(const Place p, int64_t at, float v, bool is_valid, uint32_t epoch) {
    // Two formats only: code that is not there does not have to be fetched, which costs a trip to L2 behind the weights.
    if (is_valid && p.data) {
        if (p.format == PK_F32) {
            reinterpret_cast<float *>(p.data)[at] = v;
        } else {
            reinterpret_cast<bf16 *>(p.data)[at] = __float2bfloat16(v);
        }
    }
    if (!p.packets) return;
    if (p.format == PK_F32) {
        if (is_valid) store_packet(reinterpret_cast<void *>(p.packets + at * 8), __float_as_uint(v), epoch);
    } else {
        const float next = __shfl_down_sync(~0u, v, 1);
        if (is_valid && !(at & 1)) store_packet(reinterpret_cast<void *>(p.packets + at * 4), pack_bf16(v, next), epoch);
    }
}

// Two neighbours, the first one's column even.
__device__ __forceinline__ void write_pair(const Place &p, int64_t at, float2 v, uint32_t epoch) {
    if (p.format == PK_F32) {
        if (p.data) *reinterpret_cast<float2 *>(p.data + at * 4) = v;
        if (p.packets) store_packets2(reinterpret_cast<void *>(p.packets + at * 8), __float_as_uint(v.x), __float_as_uint(v.y), epoch);
    } else {
        const uint32_t both = pack_bf16(v.x, v.y);
        if (p.data) *reinterpret_cast<uint32_t *>(p.data + at * 2) = both;
        if (p.packets) store_packet(reinterpret_cast<void *>(p.packets + at * 4), both, epoch);
    }
}

// Eight elements of piece i of a row: whole pieces for bf16, the halves of a lane's share of 32 for integers.
template <bool kInteger>
__device__ __forceinline__ int first_of(int piece) { return kInteger ? (piece >> 2) * 32 + (piece & 3) * 4 : piece * 8; }

// Byte `which` of four words.
template <int kWhich>
__device__ __forceinline__ uint32_t gather_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    constexpr uint32_t kPair = (4 + kWhich) << 4 | kWhich;
    return __byte_perm(__byte_perm(a, b, kPair), __byte_perm(c, d, kPair), 0x5410);
}

// Eight elements of a block of 32, whose others the neighbouring three lanes hold. With q the element over the block's scale,
// rounded, q + 128 stands in the mantissa after one addition: its second byte is the high byte of q, its first one, turned
// around, the low byte, both signed.
__device__ __forceinline__ void put_integers(uint8_t *xs, float *scales, const float *v, int piece, bool is_bytes) {
    float most = fabsf(v[0]), first = (v[0] + v[1]) + (v[2] + v[3]), second = (v[4] + v[5]) + (v[6] + v[7]);
#pragma unroll
    for (int i = 1; i < 8; ++i) most = fmaxf(most, fabsf(v[i]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    first += __shfl_xor_sync(~0u, first, 1);
    second += __shfl_xor_sync(~0u, second, 1);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    first += __shfl_xor_sync(~0u, first, 2);
    second += __shfl_xor_sync(~0u, second, 2);
    const float inverse = most > 1e-30f ? __fdividef(kMostInteger, most) : 0.0f;
    uint32_t q[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = __float_as_uint(fmaf(v[i], inverse, 12582912.0f + 128.0f));
    const int block = piece >> 2, c = piece & 3;
    uint8_t *to = xs + block * 64 + c * 8;
    // The order in which a lane's codes lie in the words of a unit.
    const uint32_t b = is_bytes ? q[2] : q[4], d = is_bytes ? q[3] : q[5], e = is_bytes ? q[4] : q[2], g = is_bytes ? q[5] : q[3];
    *reinterpret_cast<uint2 *>(to) = make_uint2(gather_bytes<1>(q[0], b, q[1], d), gather_bytes<1>(e, q[6], g, q[7]));
    *reinterpret_cast<uint2 *>(to + 32) = make_uint2(gather_bytes<0>(q[0], b, q[1], d) ^ 0x80808080u, gather_bytes<0>(e, q[6], g, q[7]) ^ 0x80808080u);
    if (c == 0) *reinterpret_cast<float4 *>(scales + block * 4) = make_float4(most * (1.0f / kMostInteger), first, second, 0.0f);
}

__device__ __forceinline__ void put_bf16(uint8_t *row, const float *v, int piece) {
    *reinterpret_cast<uint4 *>(row + piece * 16) = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}
// By a warp: 256 elements for FP8 weights, as f16 over a power of two that brings the largest to 2^14 at least.
__device__ __forceinline__ void put_f16(uint8_t *row, float *factors, const float *v, int piece, int lane) {
    float most = fabsf(v[0]);
#pragma unroll
    for (int i = 1; i < 8; ++i) most = fmaxf(most, fabsf(v[i]));
    const uint32_t exponent = max(__reduce_max_sync(~0u, __float_as_uint(most)) >> 23, 20u);
    const float inverse = __uint_as_float((268 - exponent) << 23);
    if (lane == 0) factors[piece >> 5] = __uint_as_float((exponent - 14) << 23);
    auto pack = [&](float a, float b) {
        const __half2 h = __floats2half2_rn(a * inverse, b * inverse);
        return *reinterpret_cast<const uint32_t *>(&h);
    };
    // A lane of the product reads 16 neighbours of a run of 64 as two halves, which change places in odd runs: eight lanes read two runs at once.
    const int run = piece >> 3, in = piece & 7;
    *reinterpret_cast<uint4 *>(row + run * 128 + ((in ^ run) & 1) * 64 + (in >> 1) * 16) = make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

// Packets of three words and an epoch: all of a warp's, those at at(j, s), asked for again and again while any has not come.
template <int kKept, class At>
__device__ __forceinline__ void await_quads(uint4 (&raw)[kKept][2], uint32_t epoch, const At &at) {
    bool is_there;
    do {
#pragma unroll
        for (int j = 0; j < kKept; ++j)
#pragma unroll
            for (int s = 0; s < 2; ++s) load_quad_again(raw[j][s], at(j, s), epoch);
        is_there = true;
#pragma unroll
        for (int j = 0; j < kKept; ++j) is_there &= raw[j][0].w == epoch && raw[j][1].w == epoch;
    } while (!__all_sync(~0u, is_there));
}

// Copies what this warp multiplies first of folded x: of each of its chunks eight records, two packets a lane. Returns this lane's sum of squares. before: see stage.
__device__ __forceinline__ float take_folded(const Phase &p, const Arguments &a, int at, uint8_t *xs, uint32_t base, const Met &before) {
    constexpr int kKept = 6, kRecords = 8, kCodesStep = 64 * kRecords, kScalesStep = 16 * kRecords;
    const int lane = thread_here() & 31, warp = thread_here() >> 5, n_chunks = p.k / 256, x_row = x_row_bytes(p.staging, p.k);
    const uint32_t epoch = base + p.x.source + 1;
    const bool has_second = lane + 32 < kRecords * kFoldedPackets;
    // Where a packet's first word goes, and the two others, in the first chunk: among codes, or among scales, which lie closer together.
    uint32_t to[2][2];
    bool is_scale[2][2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        const int packet = lane + 32 * s, record = packet / kFoldedPackets, i = 3 * (packet - record * kFoldedPackets);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            is_scale[s][w] = i + w >= 16;
            to[s][w] = shared_address(xs) + (is_scale[s][w] ? x_row + record * 16 + 4 * (i + w - 16) : record * 64 + 4 * (i + w));
        }
    }
    float squares = 0.0f;
#pragma unroll 1
    for (int first = warp; first < n_chunks; first += kKept * kWarps) {
        const uint8_t *from = reinterpret_cast<const uint8_t *>(p.folded_x) + first * (kRecords * kFoldedBytes) + 16 * lane;
        constexpr int kApart = kWarps * kRecords * kFoldedBytes;
        uint4 raw[kKept][2];
#pragma unroll
        for (int j = 0; j < kKept; ++j)
#pragma unroll
            for (int s = 0; s < 2; ++s) raw[j][s] = make_uint4(0, 0, 0, first + j * kWarps < n_chunks && (s == 0 || has_second) ? ~epoch : epoch);
        // A few lanes ask for one packet each until the first has come; see stage.
        const uint8_t *last = from + (min(kKept, (n_chunks - first + kWarps - 1) / kWarps) - 1) * kApart;
        await_any(last + 12, epoch, lane);
        await_quads(raw, epoch, [from](int j, int s) { return from + j * kApart + 512 * s; });
        mark(at, 1);
        before.await();
#pragma unroll
        for (int j = 0; j < kKept; ++j) {
            const int chunk = first + j * kWarps;
            if (chunk >= n_chunks) break;
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                if (s == 1 && !has_second) continue;
                const uint32_t first_to = to[s][0] + chunk * (is_scale[s][0] ? kScalesStep : kCodesStep), others_to = to[s][1] + chunk * (is_scale[s][1] ? kScalesStep : kCodesStep);
                store_shared(first_to, raw[j][s].x);
                store_shared(others_to, raw[j][s].y);
                if (is_scale[s][0]) squares += __uint_as_float(raw[j][s].y);
                else store_shared(others_to + 4, raw[j][s].z);
            }
        }
    }
    return squares;
}

// Puts down what this warp multiplies first of x that came in fours. Returns this lane's sum of squares. before: see stage.
template <bool kInteger>
__device__ __forceinline__ float take_fours(const Phase &p, const Arguments &a, int at, uint8_t *xs, uint32_t base, const Met &before) {
    constexpr int kKept = 3;
    // From a lane's first four to its second: neighbours, or of integers the other half of 32.
    constexpr int kApart = kInteger ? 64 : 16;
    const int lane = thread_here() & 31, warp = thread_here() >> 5, staging = p.staging, k = p.k, n_blocks = staged_elements(staging, k) >> 8;
    const bool is_wide = !kInteger && staging == kStageFp8;
    auto block_of = [&](int i) { return is_wide ? (i & ~1) * kWarps + 2 * warp + (i & 1) : i * kWarps + warp; };
    const uint32_t epoch = base + p.x.source + 1;
    float *factors = reinterpret_cast<float *>(xs + x_row_bytes(staging, k));
    float squares = 0.0f;
#pragma unroll 1
    for (int first = 0; block_of(first) < n_blocks; first += kKept) {
        uint4 raw[kKept][2];
        const uint8_t *from[kKept];
#pragma unroll
        for (int j = 0; j < kKept; ++j) {
            const int element = block_of(first + j) * 256 + lane * 8;
            const bool is_one = element < k;
            from[j] = reinterpret_cast<const uint8_t *>(p.folded_x) + 4 * static_cast<int64_t>(!is_one ? 0 : kInteger ? element - lane * 8 + first_of<true>(lane) : element);
            raw[j][0] = raw[j][1] = make_uint4(0, 0, 0, is_one ? ~epoch : epoch);
        }
        await_any(from[0] + kApart + 12, epoch, lane);
        await_quads(raw, epoch, [&](int j, int s) { return from[j] + kApart * s; });
        mark(at, 1);
        before.await();
        auto numbers_of = [](const uint4 (&r)[2], float (&v)[8]) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                v[4 * s] = low_f32(r[s].x); v[4 * s + 1] = high_f32(r[s].x);
                v[4 * s + 2] = low_f32(r[s].y); v[4 * s + 3] = high_f32(r[s].y);
            }
        };
        if constexpr (kInteger) {
            // A loop, as in stage.
#pragma unroll 1
            for (int j = 0; j < kKept; ++j) {
                const int block = block_of(first + j);
                if (block >= n_blocks) break;
                squares += __uint_as_float(raw[0][0].z) + __uint_as_float(raw[0][1].z);
                float v[8];
                numbers_of(raw[0], v);
                put_integers(xs, factors, v, block * 32 + lane, staging == kStageBytes);
#pragma unroll
                for (int i = 0; i + 1 < kKept; ++i)
#pragma unroll
                    for (int s = 0; s < 2; ++s) raw[i][s] = raw[i + 1][s];
            }
        } else {
#pragma unroll
            for (int j = 0; j < kKept; ++j) {
                const int block = block_of(first + j), piece = block * 32 + lane;
                if (block >= n_blocks) break;
                squares += __uint_as_float(raw[j][0].z) + __uint_as_float(raw[j][1].z);
                if (is_wide) {
                    float v[8];
                    numbers_of(raw[j], v);
                    put_f16(xs, factors, v, piece, lane);
                } else {
                    *reinterpret_cast<uint4 *>(xs + piece * 16) = make_uint4(raw[j][0].x, raw[j][0].y, raw[j][1].x, raw[j][1].y);
                }
            }
        }
    }
    return squares;
}

// By those that write: what was in memory before this launch becomes packets, each block a share of the row's elements.
__device__ __forceinline__ void publish(const Phase &p, int tid, uint32_t epoch) {
    for (int i = 2 * (tid * gridDim.x + blockIdx.x); i < p.k; i += 2 * gridDim.x * 32 * kWriters) {
        if (p.x.format == PK_F32) {
            const float2 v = __ldcg(reinterpret_cast<const float2 *>(p.x.data + i * 4));
            store_packet(reinterpret_cast<void *>(p.y.packets + i * 8), __float_as_uint(v.x), epoch);
            store_packet(reinterpret_cast<void *>(p.y.packets + i * 8 + 8), __float_as_uint(v.y), epoch);
        } else {
            store_packet(reinterpret_cast<void *>(p.y.packets + i * 4), __ldcg(reinterpret_cast<const uint32_t *>(p.x.data + i * 2)), epoch);
        }
    }
}

// Stages what this warp multiplies first: the chunks of its own number, and those kWarps further on. kNorm: x is F32 and takes
// the norm's weights; the norm's factor is the same for all of x and comes in when the sums are complete. Otherwise x is BF16 and
// taken as it is. Returns this lane's sum of squares.
//
// x of the phase before may still be multiplied with by slower warps, although what this warp stages has come: it lies elsewhere in
// x, and this block's outputs need not be in it. `before` tells when none does.
template <bool kInteger, bool kNorm>
__device__ __forceinline__ float stage(const Phase &p, const Arguments &a, int at, uint8_t *xs, int row, uint32_t base, const Met &before) {
    constexpr int kKept = kNorm ? 2 : 6, kBytes = kNorm ? 8 : 4, kWords = kNorm ? 4 : 2;
    const int lane = thread_here() & 31, warp = thread_here() >> 5, staging = p.staging, k = p.k, n_blocks = staged_elements(staging, k) >> 8;
    const bool is_wide = !kInteger && staging == kStageFp8;
    // This warp's blocks of 256 elements, counted over all of x: a chunk of FP8 has two.
    auto block_of = [&](int i) { return is_wide ? (i & ~1) * kWarps + 2 * warp + (i & 1) : i * kWarps + warp; };
    const uint32_t epoch = base + p.x.source + 1;
    const uint8_t *x = packet_at<kNorm>(p.x.packets, row * p.x.stride);
    float *scales = reinterpret_cast<float *>(xs + x_row_bytes(staging, p.k));
    float squares = 0.0f;
#pragma unroll 1
    for (int first = 0; block_of(first) < n_blocks; first += kKept) {
        const uint8_t *from[kKept];
        int piece[kKept];
        float w[kNorm ? kKept : 1][8];
#pragma unroll
        for (int j = 0; j < kKept; ++j) {
            const int block = block_of(first + j);
            piece[j] = block * 256 + lane * 8 < k ? block * 32 + lane : -1;
            const int element = min((piece[j] < 0 ? block_of(first) : block) * 256 + first_of<kInteger>(lane), k - 8);
            from[j] = x + static_cast<int64_t>(element) * kBytes;
            if constexpr (kNorm) {
                *reinterpret_cast<float4 *>(w[j]) = __ldg(reinterpret_cast<const float4 *>(p.norm + element));
                *reinterpret_cast<float4 *>(w[j] + 4) = __ldg(reinterpret_cast<const float4 *>(p.norm + element + (kInteger ? 16 : 4)));
            }
        }
        // A few lanes ask for one packet each until the first has come; then all is asked for, and what is missing again and again. Asking for
        // everything early is in the way of other blocks' outputs, and of the weights.
        const uint8_t *last = from[kKept - 1] + ((kInteger ? 16 : 4) + 2) * kBytes;
        bool is_there = kNorm && p.is_plain;
        uint4 raw[kKept][kWords];
        if (is_there) {
            // Twice as far apart lie packets.
            const uint8_t *memory = reinterpret_cast<const uint8_t *>(p.x.data) + row * p.x.stride * 4;
#pragma unroll
            for (int j = 0; j < kKept; ++j)
#pragma unroll
                for (int i = 0; i < kWords; i += 2) {
                    const float4 v = __ldcg(reinterpret_cast<const float4 *>(memory + (from[j] - x) / 2 + (i ? (kInteger ? 64 : 16) : 0)));
                    raw[j][i] = make_uint4(__float_as_uint(v.x), epoch, __float_as_uint(v.y), epoch);
                    raw[j][i + 1] = make_uint4(__float_as_uint(v.z), epoch, __float_as_uint(v.w), epoch);
                }
        } else {
            await_any(last + 4, epoch, lane);
#pragma unroll
            for (int j = 0; j < kKept; ++j)
#pragma unroll
                for (int i = 0; i < kWords; ++i) raw[j][i] = make_uint4(0, piece[j] < 0 ? epoch : ~epoch, 0, epoch);
        }
        while (!__all_sync(~0u, is_there)) {
            uint32_t missing = 0;
#pragma unroll
            for (int j = 0; j < kKept; ++j)
#pragma unroll
                for (int i = 0; i < kWords; ++i) load_packets2_again(raw[j][i], from[j] + (i & (kWords / 2 - 1)) * 16 + (i / (kWords / 2)) * ((kInteger ? 16 : 4) * kBytes), epoch);
#pragma unroll
            for (int j = 0; j < kKept; ++j)
#pragma unroll
                for (int i = 0; i < kWords; ++i) missing |= (raw[j][i].y ^ epoch) | (raw[j][i].w ^ epoch);
            is_there = missing == 0;
        }
        mark(at, 1);
        before.await();
        // What is put down next stands in front, so that putting down stays a loop: code that runs once costs more to fetch than to carry out.
        float v[kNorm ? kKept : 1][8];
        uint32_t pairs[kNorm ? 1 : kKept][4];
#pragma unroll
        for (int j = 0; j < kKept; ++j) {
            if constexpr (kNorm) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    v[j][2 * i] = __uint_as_float(raw[j][i].x);
                    v[j][2 * i + 1] = __uint_as_float(raw[j][i].z);
                }
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    if (piece[j] >= 0) squares += v[j][e] * v[j][e];
                    v[j][e] *= w[j][e];
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) pairs[j][i] = i & 1 ? raw[j][i / 2].z : raw[j][i / 2].x;
            }
        }
#pragma unroll 1
        for (int j = 0; j < kKept; ++j) {
            const int block = block_of(first + j), at_piece = block * 32 + lane;
            if (block >= n_blocks) break;
            if constexpr (!kNorm) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    v[0][2 * i] = low_f32(pairs[0][i]);
                    v[0][2 * i + 1] = high_f32(pairs[0][i]);
                }
            }
            if constexpr (kInteger) {
                put_integers(xs, scales, v[0], at_piece, staging == kStageBytes);
            } else if (staging == kStageFp8) {
                put_f16(xs, scales, v[0], at_piece, lane);
            } else {
                put_bf16(xs, v[0], at_piece);
            }
#pragma unroll
            for (int i = 0; i + 1 < kKept; ++i)
#pragma unroll
                for (int e = 0; e < (kNorm ? 8 : 4); ++e) {
                    if constexpr (kNorm) v[i][e] = v[i + 1][e];
                    else pairs[i][e] = pairs[i + 1][e];
                }
        }
    }
    return squares;
}

}  // namespace pk::persist
