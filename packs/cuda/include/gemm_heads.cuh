// Queries, keys and values where an even product ends (skinny.cuh, HeadsEnd): normed, rotated and written to where they are wanted.
#pragma once
#include "gemm_store.cuh"
#include "turn.cuh"

namespace pk {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Stores of rows that are there, by code that is gone through for the others, too: what is jumped over in a rehearsal would come from memory.
__device__ __forceinline__ void store_where(bool is_in, float *to, float4 v) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(static_cast<int>(is_in)) : "memory");
}
__device__ __forceinline__ void store_where(bool is_in, void *to, uint2 v) { asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.u32 [%0], {%1, %2};\n}" ::"l"(to), "r"(v.x), "r"(v.y), "r"(static_cast<int>(is_in)) : "memory"); }
__device__ __forceinline__ void store_where(bool is_in, void *to, uint32_t v) { asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.global.u32 [%0], %1;\n}" ::"l"(to), "r"(v), "r"(static_cast<int>(is_in)) : "memory"); }
__device__ __forceinline__ void store_where(bool is_in, void *to, uint4 v) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(is_in)) : "memory");
}

// What a head's end reads, brought to shared memory before: whoever asks for it at the end waits behind the weights of the next launch.
struct HeadBeside {
    float gains[128], frequency[64];
    int position[128], page[128];
};

// A thread of `n`, in one block's head; positions are the steps' own.
__device__ __forceinline__ void load_head(const HeadsEnd &e, int head, int thread, int n, int n_rows, HeadBeside &to) {
    const float *norm = head < e.n_heads ? e.q_norm : head < e.n_heads + e.n_kv_heads ? e.k_norm : e.v_norm;
    for (int i = thread; i < 128; i += n) {
        to.gains[i] = norm != nullptr ? __ldg(norm + i) : 1.0f;
        to.position[i] = i < n_rows ? __ldg(e.position + i) : 0;
        to.page[i] = i < n_rows && head >= e.n_heads ? __ldg(e.page + i) : 0;
        if (i < 64) to.frequency[i] = e.frequency != nullptr ? __ldg(e.frequency + i) : 0.0f;
    }
}

// Sines and cosines of a row: lane c of four has those of columns 8 j + 2 c and the next of 64, as [2 j] and [2 j + 1].
__device__ __forceinline__ void turn_head(const HeadsEnd &e, int head, int row, int c, const HeadBeside &beside, float (&turns)[16][2]) {
    if (head >= e.n_heads + e.n_kv_heads || e.frequency == nullptr) return;
    const float position = static_cast<float>(beside.position[row]);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float2 frequency = *reinterpret_cast<const float2 *>(beside.frequency + 8 * j + 2 * c);
        turn(position * frequency.x, &turns[2 * j][0], &turns[2 * j][1]);
        turn(position * frequency.y, &turns[2 * j + 1][0], &turns[2 * j + 1][1]);
    }
}

// A row of x of a head: lane c of four has columns 8 j + 2 c and the next of 128.
__device__ __forceinline__ void store_head(const GemmArguments &a, int head, int row, int c, int n_rows, const HeadBeside &beside, const float (&turns)[16][2], float (&v)[16][2]) {
    const HeadsEnd &e = a.heads;
    const bool is_q = head < e.n_heads, is_v = head >= e.n_heads + e.n_kv_heads, is_in = row < n_rows;
    const float *norm = is_q ? e.q_norm : is_v ? e.v_norm : e.k_norm;
    const int position = beside.position[row];
    if (norm != nullptr) {
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < 16; ++j) square += v[j][0] * v[j][0] + v[j][1] * v[j][1];
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        const float r = rsqrtf(square / 128 + e.eps);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float2 gain = *reinterpret_cast<const float2 *>(beside.gains + 8 * j + 2 * c);
            v[j][0] *= r * gain.x;
            v[j][1] *= r * gain.y;
        }
    }
    if (!is_v && e.frequency != nullptr) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float sine = turns[2 * j + i][0] * e.magnitude, cosine = turns[2 * j + i][1] * e.magnitude, low = v[j][i], high = v[j + 8][i];
                v[j][i] = low * cosine - high * sine;
                v[j + 8][i] = low * sine + high * cosine;
            }
    }
    if (e.gains != nullptr) {
        const float gain = __ldg(e.gains + head);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            v[j][0] *= gain;
            v[j][1] *= gain;
        }
    }
    const int64_t place = (static_cast<int64_t>(head - e.n_heads - (is_v ? e.n_kv_heads : 0)) * e.page_tokens + position % e.page_tokens) << 7;
    uint8_t *kv = e.kv + beside.page[row] * e.page_stride + (is_v ? e.v_offset : e.k_offset);
    if (is_q || e.kv_format == PK_BF16) {
        uint8_t *to = is_q ? static_cast<uint8_t *>(e.q) + (row * e.q_stride + (static_cast<int64_t>(head) << 7)) * 2 : kv + 2 * place;
        auto pair = [&](int j) { return pack_bf16(v[j][0], v[j][1]); };
#pragma unroll
        for (int j = 0; j < 16; j += 4) store_where(is_in, to + 16 * (j + c), gather_columns(pair(j), pair(j + 1), pair(j + 2), pair(j + 3), c));
        return;
    }
    auto codes = [&](int j) { return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(v[j][0], v[j][1]), __NV_SATFINITE, __NV_E4M3)); };
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        auto word = [&](int b) { return codes(4 * b + 2 * p) | codes(4 * b + 2 * p + 1) << 16; };
        const uint4 w = gather_columns(word(0), word(1), word(2), word(3), c);
        store_where(is_in, kv + place + 32 * c + 16 * p, make_uint4(__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410), __byte_perm(w.x, w.y, 0x7632), __byte_perm(w.z, w.w, 0x7632)));
    }
}
#endif

}  // namespace pk
