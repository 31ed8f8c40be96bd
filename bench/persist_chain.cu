// Layers of a dense model as one launch of the one-row kernel (packs/cuda/src/persist), standalone: right by a plain reference in double (CHECK 1, one layer), equal
// bit for bit in REPEATS launches, the median time of TIMED launches, and, built with -DPK_PERSIST_TRACE, where the time goes.
// Usage: persist_chain bf16|fp8|q8_0|q6_k|q4_k|q4_k_m 8b|32b|tiny LAYERS POSITION CHECK REPEATS TIMED [HEAD [BLOCKS [SENT [AHEAD]]]]
// Build: nvcc -std=c++20 -O3 --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a -DPK_WGMMA -DPK_PERSIST_ROWS=1 -I. bench/persist_chain.cu
#include "packs/cuda/src/persist/kernel.cu"
#include "packs/cuda/src/persist/plan.cu"
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace pk {
int32_t fail(int32_t status, const char *format, ...) {
    va_list a;
    va_start(a, format);
    vprintf(format, a);
    puts("");
    return status;
}

const Packed *find_packed(pk_ctx *, const pk_tensor &) {
    return nullptr;
}
bool has_wgmma(const pk_ctx *) {
    return true;
}
cudaStream_t stream_of_questions(const pk_ctx *) {
    return nullptr;
}
GuessPart guess_part(const Records &) {
    return {};
}
}  // namespace pk
using namespace pk;
using namespace pk::persist;
#define OK(x)                                               \
    do {                                                    \
        cudaError_t e_ = (x);                               \
        if (e_ != cudaSuccess) {                            \
            printf("%s: %s\n", #x, cudaGetErrorString(e_)); \
            fflush(stdout);                                 \
            exit(1);                                        \
        }                                                   \
    } while (0)

__host__ __device__ inline uint64_t mix(uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
__device__ float uniform(uint64_t s) {
    return (mix(s) >> 40) * (2.0f / 16777216.0f) - 1.0f;
}
// Weights of any format, sized so that products of unit x are about one.
__global__ void fill_bytes(uint32_t *p, int64_t words, uint64_t seed) {
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += int64_t{gridDim.x} * blockDim.x)
        p[i] = static_cast<uint32_t>(mix(seed + i));
}
__global__ void fill_bf16(__nv_bfloat16 *p, int64_t n, uint64_t seed, float size) {
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
        p[i] = __float2bfloat16(uniform(seed + i) * size);
}
__global__ void fill_f32(float *p, int64_t n, uint64_t seed, float mean, float size) {
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
        p[i] = mean + uniform(seed + i) * size;
}
__global__ void fill_fp8(uint8_t *p, int64_t n, uint64_t seed) {
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
        uint8_t b = mix(seed + i) >> 20;
        p[i] = (b & 0x7f) > 0x77 ? b & 0x87 : b;
    }
}
__global__ void fix_factors(uint8_t *p, int64_t chunks, int format, float size, uint64_t seed) {
    int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
    if (i >= chunks) return;
    if (format == PK_Q4_K) {
        using U = Unit<PK_Q4_K>;
        uint8_t *u = p + i * U::kBytes;
        for (int j = 0; j < 16 * U::kRowScaleBytes; ++j)
            u[U::kScaleAt + j] &= 63;
        for (int j = 0; j < 16; ++j) {
            ((__half *)(u + U::kFactorAt))[2 * j] = __float2half(size * (1.0f + 0.3f * uniform(seed + i * 16 + j)) / 600);
            ((__half *)(u + U::kFactorAt))[2 * j + 1] = __float2half(size / 80);
        }
    }
    if (format == PK_Q6_K) {
        using U = Unit<PK_Q6_K>;
        uint8_t *u = p + i * U::kBytes;
        for (int j = 0; j < 16; ++j)
            ((__half *)(u + U::kFactorAt))[j] = __float2half(size * (1.0f + 0.3f * uniform(seed + i * 16 + j)) / 1500);
    }
    if (format == PK_Q8_0) {
        using U = Unit<PK_Q8_0>;
        for (int h = 0; h < 2; ++h) {
            uint8_t *u = p + (2 * i + h) * U::kBytes;
            for (int j = 0; j < 64; ++j)
                ((__half *)(u + U::kScaleAt))[j] = __float2half(size * (1.0f + 0.3f * uniform(seed + i * 128 + h * 64 + j)) / 80);
        }
    }
}
// An element as the layout of its format has it, read without the kernel's own code.
__device__ float weight_at(const Weight &w, int row, int k) {
    const int tile = row / 16, r = row % 16, lane_r = r % 8, hi = r / 8, e = k % 32, c = (e % 16) / 4, j = e % 4 + 4 * (e / 16), lane = lane_r * 4 + c;
    if (w.format == PK_BF16) return __bfloat162float(((const __nv_bfloat16 *)(w.data + row * w.row_bytes))[k]);
    if (w.format == PK_FP8_E4M3) {
        __nv_fp8_e4m3 f;
        f.__x = w.data[row * w.row_bytes + k];
        return float(f) * (w.block_scale ? w.block_scale[(row / 128) * w.scale_stride + k / 128] : w.row_scale ? w.row_scale[row] : 1.0f);
    }
    const int low_at[8] = {0, 2, 0, 2, 1, 3, 1, 3}, is_high[8] = {0, 0, 1, 1, 0, 0, 1, 1};
    const uint8_t *u = w.data + (int64_t{tile} * w.n_chunks + k / 256) * block_chunk_bytes(w.format);
    const int kk = k % 256, b = kk / 32;
    if (w.format == PK_Q4_K) {
        using U = Unit<PK_Q4_K>;
        const uint8_t *q = u + 1024 * (b / 4) + 512 * ((b % 4) / 2) + 16 * lane + 4 * ((b & 1) * 2 + hi) + low_at[j];
        const int code = is_high[j] ? *q >> 4 : *q & 15;
        const uint8_t *s = u + U::kScaleAt + 32 * lane_r + 16 * hi;
        const __half *f = (const __half *)(u + U::kFactorAt + 8 * lane_r + 4 * hi);
        return __half2float(f[0]) * s[b] * code - __half2float(f[1]) * s[8 + b];
    }
    if (w.format == PK_Q6_K) {
        using U = Unit<PK_Q6_K>;
        const uint8_t *q = u + 512 * (b / 2) + 16 * lane + 4 * ((b & 1) * 2 + hi) + low_at[j];
        const int low = is_high[j] ? *q >> 4 : *q & 15;
        const uint32_t h = *(const uint32_t *)(u + U::kLowBytes + 512 * hi + 16 * lane + 4 * (b / 2));
        const int s0 = (b & 1) * 8;
        auto moved = [](uint32_t v, int s) { return s >= 0 ? v >> s : v << -s; };
        uint32_t bits = is_high[j] ? ((moved(h, s0 - 2) & 0x00300030u) | (moved(h, s0 - 6) & 0x30003000u))
                                   : ((moved(h, s0 - 4) & 0x00300030u) | (moved(h, s0 - 8) & 0x30003000u));
        const int code = low | ((bits >> (8 * low_at[j])) & 0x30);
        const int s = int(u[U::kScaleAt + 32 * lane_r + 16 * hi + 2 * b + e / 16]) - 128;
        return __half2float(*(const __half *)(u + U::kFactorAt + 4 * lane_r + 2 * hi)) * s * (code - 32);
    }
    using U = Unit<PK_Q8_0>;
    const uint8_t *v = u + (b / 4) * U::kBytes;
    const int word = hi * 2 + e / 16;
    const int order[4] = {0, 2, 1, 3};
    const int8_t code = (int8_t)v[512 * (b % 4) + 16 * lane + 4 * word + order[e % 4]];
    return code * __half2float(*(const __half *)(v + U::kScaleAt + 16 * lane_r + 8 * hi + 2 * (b % 4)));
}
// One block per row of the weight.
__global__ void plain_product(Weight w, Weight up, int gated, const double *x, int k, double *y, const double *add) {
    __shared__ double part[2][128];
    const int row = blockIdx.x;
    double s = 0, t = 0;
    for (int i = threadIdx.x; i < k; i += 128) {
        s += x[i] * weight_at(w, row, i);
        if (gated) t += x[i] * weight_at(up, row, i);
    }
    part[0][threadIdx.x] = s;
    part[1][threadIdx.x] = t;
    __syncthreads();
    if (threadIdx.x) return;
    s = t = 0;
    for (int i = 0; i < 128; ++i) {
        s += part[0][i];
        t += part[1][i];
    }
    if (gated) s = s / (1 + exp(-s)) * t;
    y[row] = s + (add ? add[row] : 0);
}

template <class T>
T *allocate(int64_t n) {
    T *p;
    OK(cudaMalloc(&p, n * sizeof(T) + 256));
    return p;
}
static uint64_t seed = 1;
Weight make_weight(int format, int rows, int k) {
    Weight w = {};
    const float size = 1.7f / sqrtf(k);
    w.rows = rows;
    w.n_tiles = rows >> tile_shift(format);
    w.format = format;
    w.scale = 1.0f;
    w.n_chunks = (k + chunk_elements(format) - 1) / chunk_elements(format);
    seed += 1ull << 36;
    if (is_rows(format)) {
        w.row_bytes = int64_t{k} * (format == PK_BF16 ? 2 : 1);
        w.data = allocate<uint8_t>(rows * w.row_bytes);
        if (format == PK_BF16) fill_bf16<<<1024, 256>>>((__nv_bfloat16 *)w.data, int64_t{rows} * k, seed, size);
        else {
            fill_fp8<<<1024, 256>>>((uint8_t *)w.data, int64_t{rows} * k, seed);
            w.scale_stride = (k / 128 + 3) / 4 * 4;
            float *s = allocate<float>((rows / 128 + 1) * w.scale_stride);
            fill_f32<<<64, 256>>>(s, (rows / 128 + 1) * w.scale_stride, seed + 7, size / 60, size / 200);
            w.block_scale = s;
        }
    } else {
        const int64_t chunks = int64_t{w.n_tiles} * w.n_chunks, bytes = chunks * block_chunk_bytes(format);
        w.data = allocate<uint8_t>(bytes);
        fill_bytes<<<1024, 256>>>((uint32_t *)w.data, bytes / 4, seed);
        fix_factors<<<(chunks + 255) / 256, 256>>>((uint8_t *)w.data, chunks, format, size, seed);
    }
    OK(cudaGetLastError());
    return w;
}
template <class T>
std::vector<T> host(const T *p, int64_t n) {
    std::vector<T> v(n);
    OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}
double error_of(const std::vector<double> &a, const std::vector<double> &b) {
    double d = 0, n = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        d += (a[i] - b[i]) * (a[i] - b[i]);
        n += b[i] * b[i];
    }
    return sqrt(d / n);
}
std::vector<double> from_bf16(const __nv_bfloat16 *p, int n) {
    auto v = host(p, n);
    std::vector<double> o(n);
    for (int i = 0; i < n; ++i)
        o[i] = __bfloat162float(v[i]);
    return o;
}
std::vector<double> from_f32(const float *p, int n) {
    auto v = host(p, n);
    return {v.begin(), v.end()};
}
double *device_of(const std::vector<double> &v) {
    double *p = allocate<double>(v.size());
    OK(cudaMemcpy(p, v.data(), v.size() * 8, cudaMemcpyHostToDevice));
    return p;
}

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const std::string name = argv[1], shape = argv[2];
    const int layers = atoi(argv[3]), position = atoi(argv[4]), wants_check = atoi(argv[5]), repeats = atoi(argv[6]), timed = atoi(argv[7]),
              with_head = argc > 8 ? atoi(argv[8]) : 0, asked_blocks = argc > 9 ? atoi(argv[9]) : 0, asked_sent = argc > 10 ? atoi(argv[10]) : -1, asked_ahead = argc > 11 ? atoi(argv[11]) : -1;
    const int format = name == "bf16" ? PK_BF16 : name == "fp8" ? PK_FP8_E4M3 : name == "q8_0" ? PK_Q8_0 : name == "q6_k" ? PK_Q6_K : PK_Q4_K;
    const int width = shape == "8b"     ? 4096
                      : shape == "32b"  ? 5120
                      : shape == "tiny" ? 512
                                        : 1024,
              ff = shape == "8b"     ? 12288
                   : shape == "32b"  ? 25600
                   : shape == "tiny" ? 768
                                     : 3072,
              heads = shape == "8b"     ? 32
                      : shape == "32b"  ? 64
                      : shape == "tiny" ? 4
                                        : 16,
              kv_heads = shape == "tiny" ? 2 : 8, d = 128, page = 16;
    const int tail = name == "q4_k_m" ? PK_Q6_K : format;
    cudaDeviceProp prop;
    OK(cudaGetDeviceProperties(&prop, 0));
    const int n_blocks = asked_blocks ? asked_blocks : prop.multiProcessorCount;
    // State: a page table, pages, a row.
    const int n_pages = position / page + 2;
    const int64_t page_bytes = 256 + int64_t{2} * kv_heads * page * d * 2;
    uint8_t *kv = allocate<uint8_t>((n_pages + 1) * page_bytes);
    fill_bf16<<<512, 256>>>((__nv_bfloat16 *)kv, (n_pages + 1) * page_bytes / 2, 99, 1.0f);
    std::vector<int32_t> table(n_pages);
    for (int i = 0; i < n_pages; ++i)
        table[i] = 1 + (i * 7919) % n_pages;
    {
        std::vector<int> used(n_pages + 1, 0);
        for (int &t : table) {
            while (used[t])
                t = t % n_pages + 1;
            used[t] = 1;
        }
    }
    int32_t *page_table = allocate<int32_t>(n_pages), *facts = allocate<int32_t>(8);
    OK(cudaMemcpy(page_table, table.data(), n_pages * 4, cudaMemcpyHostToDevice));
    const int32_t row[5] = {0, position, 0, table[position / page], 0};  // slot, position, flags, page, sample
    OK(cudaMemcpy(facts, row, sizeof row, cudaMemcpyHostToDevice));
    StepInfo info = {};
    info.n_tokens = info.n_rows = info.n_samples = 1;
    StepInfo *d_info = allocate<StepInfo>(1);
    OK(cudaMemcpy(d_info, &info, sizeof info, cudaMemcpyHostToDevice));
    float *residual = allocate<float>(8 * width), *start = allocate<float>(8 * width), *norms = allocate<float>(int64_t{2} * layers * width + width),
          *frequency = allocate<float>(64), *head_norms = allocate<float>(256);
    fill_f32<<<8, 256>>>(start, width, 5, 0.0f, 1.7f);
    fill_f32<<<64, 256>>>(norms, int64_t{2} * layers * width + width, 6, 1.0f, 0.3f);
    fill_f32<<<1, 256>>>(head_norms, 256, 7, 1.0f, 0.2f);
    {
        float f[64];
        for (int i = 0; i < 64; ++i)
            f[i] = powf(1e6f, -2.0f * i / 128);
        OK(cudaMemcpy(frequency, f, sizeof f, cudaMemcpyHostToDevice));
    }
    const int qkv_n = (heads + 2 * kv_heads) * d;
    __nv_bfloat16 *qkv = allocate<__nv_bfloat16>(8 * qkv_n), *attended = allocate<__nv_bfloat16>(8 * heads * d), *hidden = allocate<__nv_bfloat16>(8 * ff);
    auto tensor = [&](const void *p, int64_t cols, int fmt) {
        pk_tensor t = {};
        t.data = (uint64_t)p;
        t.cols = cols;
        t.rows = PK_ROWS_T;
        t.stride = cols * (fmt == PK_F32 ? 4 : 2);
        t.format = fmt;
        return t;
    };
    Building b = {n_blocks, {}, {}, {}, {}};
    auto put = [&](Draft &dr) {
        if (!b.add(dr)) {
            puts("phase does not follow");
            exit(1);
        }
    };
    std::vector<Weight> all;
    auto product = [&](std::vector<Weight> ws, const pk_tensor &x, const pk_tensor &y, const float *norm, bool gated, bool adds) {
        Draft dr;
        Phase &p = dr.phase;
        p.kind = kMatmul;
        p.n_w = ws.size();
        p.is_gated = gated;
        p.act = gated ? PK_ACT_SILU : PK_ACT_NONE;
        p.k = x.cols;
        p.rows_symbol = PK_ROWS_T;
        p.scale = 1.0f;
        p.staging = staging_of(ws[0].format);
        p.tile_shift = tile_shift(ws[0].format);
        int column = 0;
        for (size_t i = 0; i < ws.size(); ++i) {
            p.w[i] = ws[i];
            p.w[i].first_tile = gated ? 0 : p.n_tiles;
            p.w[i].first_column = gated ? 0 : column;
            if (!gated || !i) p.n_tiles += ws[i].n_tiles;
            column += ws[i].rows;
            all.push_back(p.w[i]);
        }
        dr.x = x;
        dr.y = y;
        if (adds) dr.add = y;
        if (norm) {
            p.norm = norm;
            p.eps = 1e-6f;
            p.inverse_k = 1.0f / x.cols;
        }
        put(dr);
    };
    const pk_tensor r_t = tensor(residual, width, PK_F32), qkv_t = tensor(qkv, qkv_n, PK_BF16), a_t = tensor(attended, heads * d, PK_BF16),
                    h_t = tensor(hidden, ff, PK_BF16);
    float *logits = with_head ? allocate<float>(8 * 151936) : nullptr;
    for (int l = 0; l < layers; ++l) {
        const bool more = tail != format && !(l & 1);
        product({make_weight(format, heads * d, width), make_weight(format, kv_heads * d, width), make_weight(more ? tail : format, kv_heads * d, width)}, r_t, qkv_t,
                norms + 2 * l * width, false, false);
        Draft at;
        at.phase.kind = kAttend;
        at.phase.rows_symbol = PK_ROWS_T;
        at.phase.attend = {.q_norm = head_norms, .k_norm = head_norms + 128, .frequency = frequency, .k_offset = 256, .v_offset = 256 + int64_t{kv_heads} * page * d * 2, .n_heads = heads,
                           .n_kv_heads = kv_heads, .head_width = d, .rope_width = d, .magnitude = 1.0f, .eps = 1e-6f, .scale = 1.0f / sqrtf(d)};
        at.x = qkv_t;
        at.y = a_t;
        put(at);
        product({make_weight(format, width, heads * d)}, a_t, r_t, nullptr, false, true);
        product({make_weight(format, ff, width), make_weight(format, ff, width)}, r_t, h_t, norms + (2 * l + 1) * width, true, false);
        product({make_weight(more ? tail : format, width, ff)}, h_t, r_t, nullptr, false, true);
    }
    if (with_head) {
        product({make_weight(name == "fp8"      ? PK_BF16
                             : name == "q4_k_m" ? PK_Q6_K
                                                : format,
                             151936, width)},
                r_t, tensor(logits, 151936, PK_F32), norms + int64_t{2} * layers * width, false, false);
    }
    double bytes = 0;
    for (auto &w : all)
        bytes += double(w.rows) * w.n_chunks * chunk_elements(w.format) * (w.format == PK_BF16 ? 2 : w.format == PK_FP8_E4M3 ? 1 : block_chunk_bytes(w.format) / 4096.0);
    std::vector<int64_t> packets;
    std::vector<Phase> phases = number_phases(b, &packets, 1);
    Arguments a = {};
    if (!share_memory(phases, n_blocks, &a)) {
        puts("does not fit");
        return 1;
    }
    if (asked_sent >= 0) a.most_sent = asked_sent;
    if (asked_ahead >= 0) a.most_ahead = asked_ahead;
    const Sort sort = sort_of(phases);
    if (of_sort(sort, [&](auto one) { return fits_pairs<one()>(a, n_blocks, nullptr); })) a.paired = kPairedGroups;
    int64_t buffer = 0;
    for (int64_t n : packets)
        buffer = std::max(buffer, (n + 255) / 256 * 256);
    const int64_t partial = int64_t{n_blocks} * (8 * d + 16) * 8;
    uint8_t *memory = allocate<uint8_t>(256 + partial + kBuffers * buffer);
    OK(cudaMemset(memory, 0, 256 + partial + kBuffers * buffer));
    for (size_t i = 0; i < phases.size(); ++i) {
        Phase &p = phases[i];
        auto address = [&](int k) { return (uint64_t)(memory + 256 + partial + k % kBuffers * buffer); };
        p.shift %= n_blocks;
        if (p.kind != kPublish) p.x.packets += address(p.x.source);
        if (p.kind == kMatmul && p.add.data) p.add.packets += address(p.add.source);
        p.y.packets = p.y.packets ? address(i) : 0;
        if (p.folded_x) p.folded_x += address(p.x.source);
        if (p.folded_y) p.folded_y += address(i);
    }
    Phase *d_phases = allocate<Phase>(phases.size());
    OK(cudaMemcpy(d_phases, phases.data(), phases.size() * sizeof(Phase), cudaMemcpyHostToDevice));
    a.phases = d_phases;
    a.n_phases = phases.size();
    if (is_rows(format)) {
        void *encode = nullptr;
        cudaDriverEntryPointQueryResult found;
        OK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found));
        std::vector<CUtensorMap> boxes(3 * phases.size());
        if (make_boxes(reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode), phases, &boxes)) return 1;
        CUtensorMap *d_boxes = allocate<CUtensorMap>(boxes.size());
        OK(cudaMemcpy(d_boxes, boxes.data(), boxes.size() * sizeof(CUtensorMap), cudaMemcpyHostToDevice));
        a.boxes = d_boxes;
    }
    a.info = d_info;
    a.sample_at = facts + 4;
    a.row_slot = facts;
    a.row_position = facts + 1;
    a.row_flags = facts + 2;
    a.token_page = facts + 3;
    a.page_table = page_table;
    a.kv = kv;
    a.page_stride = page_bytes;
    a.page_tokens = page;
    a.slot_pages = n_pages;
    a.partial = memory + 256;
    a.ends = allocate<uint8_t>(kBuffers * (n_blocks + 1) * kEndBytes);
    OK(cudaMemset(a.ends, 0, kBuffers * (n_blocks + 1) * kEndBytes));
    a.epochs = (uint32_t *)memory;
    printf("%s %s: %d layers, %.1f MB a layer, slots %d of %d, x %d, part %d, most_sent %d and %d, %d blocks\n", name.c_str(), shape.c_str(), layers, bytes / layers / 1e6,
           a.n_slots, a.slot_bytes, a.x_bytes, a.part_bytes, a.most_sent, a.most_ahead, n_blocks);
    Launch l = {};
    auto launch_all = [&] { return of_sort(sort, [&](auto one) { return launch_rows<1, one()>(l, a, n_blocks); }); };
    auto run = [&] {
        OK(cudaMemcpyAsync(residual, start, width * 4, cudaMemcpyDeviceToDevice));
        if (launch_all()) exit(1);
    };
    run();
    OK(cudaDeviceSynchronize());
    const int n_out = width + (with_head ? 151936 : 0);
    auto outputs = [&] {
        auto o = host(residual, width);
        if (with_head) {
            auto h = host(logits, 151936);
            o.insert(o.end(), h.begin(), h.end());
        }
        return o;
    };
    if (wants_check) {
        // The last layer's qkv, attention and hidden are in memory: by the residual before it that is not, so one layer only.
        if (layers != 1) {
            puts("check wants one layer");
            return 1;
        }
        auto r0 = from_f32(start, width), r1 = from_f32(residual, width), q1 = from_bf16(qkv, qkv_n), a1 = from_bf16(attended, heads * d), h1 = from_bf16(hidden, ff);
        auto nw = from_f32(norms, 3 * width);
        auto normed = [&](const std::vector<double> &r, int which) {
            double s = 0;
            for (double v : r)
                s += v * v;
            std::vector<double> o(width);
            for (int i = 0; i < width; ++i)
                o[i] = r[i] / sqrt(s / width + 1e-6) * nw[which * width + i];
            return o;
        };
        auto times = [&](const std::vector<double> &x, const Weight &w, const Weight *up, const std::vector<double> *add) {
            double *dx = device_of(x), *dy = allocate<double>(w.rows), *da = add ? device_of(*add) : nullptr;
            plain_product<<<w.rows, 128>>>(w, up ? *up : w, up != nullptr, dx, x.size(), dy, da);
            OK(cudaDeviceSynchronize());
            return host(dy, w.rows);
        };
        std::vector<double> q;
        auto x = normed(r0, 0);
        for (int i = 0; i < 3; ++i) {
            auto y = times(x, all[i], nullptr, nullptr);
            q.insert(q.end(), y.begin(), y.end());
        }
        printf("  error: qkv %.2e", error_of(q1, q));
        // Attention from the kernel's own qkv.
        auto hn = from_f32(head_norms, 256);
        auto fr = from_f32(frequency, 64);
        auto pages = host(kv, (n_pages + 1) * page_bytes);
        auto turned = [&](int at, int norm) {
            std::vector<double> v(q1.begin() + at, q1.begin() + at + d), o(d);
            double s = 0;
            for (double e : v)
                s += e * e;
            for (int i = 0; i < d; ++i)
                v[i] = v[i] / sqrt(s / d + 1e-6) * hn[norm * 128 + i];
            for (int i = 0; i < 64; ++i) {
                double g = position * fr[i];
                o[i] = v[i] * cos(g) - v[i + 64] * sin(g);
                o[i + 64] = v[i + 64] * cos(g) + v[i] * sin(g);
            }
            return o;
        };
        auto kv_at = [&](int pos, int head, bool is_v) {
            const __nv_bfloat16 *p = (const __nv_bfloat16 *)(pages.data() + table[pos / page] * page_bytes + 256 + (is_v ? int64_t{kv_heads} * page * d * 2 : 0) +
                                                             (int64_t{head} * page + pos % page) * d * 2);
            std::vector<double> v(d);
            for (int i = 0; i < d; ++i)
                v[i] = __bfloat162float(p[i]);
            return v;
        };
        std::vector<double> at(heads * d);
        for (int h = 0; h < heads; ++h) {
            auto qv = turned(h * d, 0);
            int g = h / (heads / kv_heads);
            std::vector<double> s(position + 1);
            double top = -1e30, sum = 0;
            for (int i = 0; i <= position; ++i) {
                auto k = kv_at(i, g, false);
                double t = 0;
                for (int e = 0; e < d; ++e)
                    t += k[e] * qv[e];
                s[i] = t / sqrt(d);
                top = std::max(top, s[i]);
            }
            for (double &t : s)
                sum += t = exp(t - top);
            for (int i = 0; i <= position; ++i) {
                auto v = kv_at(i, g, true);
                for (int e = 0; e < d; ++e)
                    at[h * d + e] += s[i] / sum * v[e];
            }
        }
        printf(", attention %.2e", error_of(a1, at));
        auto ra = times(a1, all[3], nullptr, &r0);
        auto hid = times(normed(ra, 1), all[4], &all[5], nullptr);
        printf(", hidden %.2e", error_of(h1, hid));
        auto rf = times(h1, all[6], nullptr, &ra);
        printf(", residual %.2e", error_of(r1, rf));
        std::vector<double> df(width), dr(width);
        for (int i = 0; i < width; ++i) {
            df[i] = r1[i] - ra[i];
            dr[i] = rf[i] - ra[i];
        }
        printf(", down %.2e\n", error_of(df, dr));
    }
    const auto first = outputs();
    bool finite = true;
    for (float v : first)
        finite &= std::isfinite(v);
    if (!finite) puts("  NOT FINITE");
    int differ = 0;
    for (int i = 0; i < repeats; ++i) {
        run();
        OK(cudaDeviceSynchronize());
        auto o = outputs();
        differ += memcmp(o.data(), first.data(), n_out * 4) != 0;
    }
    if (repeats) printf("  %d of %d launches differ\n", differ, repeats);
    if (timed) {
        cudaEvent_t e[2];
        OK(cudaEventCreate(&e[0]));
        OK(cudaEventCreate(&e[1]));
        std::vector<float> t;
        for (int i = 0; i < timed; ++i) {
            OK(cudaMemcpyAsync(residual, start, width * 4, cudaMemcpyDeviceToDevice));
            OK(cudaEventRecord(e[0]));
            launch_all();
            OK(cudaEventRecord(e[1]));
            OK(cudaDeviceSynchronize());
            float ms;
            OK(cudaEventElapsedTime(&ms, e[0], e[1]));
            t.push_back(ms * 1e3f);
        }
        std::sort(t.begin(), t.end());
        printf("  %.1f us, %.2f us a layer (least %.2f), %.0f GB/s\n", t[t.size() / 2], t[t.size() / 2] / layers, t[0] / layers, bytes / t[t.size() / 2] / 1e3);
    }
#ifdef PK_PERSIST_TRACE
    const int64_t n_trace = int64_t{a.n_phases + 1} * n_blocks * kMarks;
    std::vector<long long> tr(n_trace);
    if (pk_persist_trace(n_trace, nullptr)) return 1;
    run();
    OK(cudaDeviceSynchronize());
    if (pk_persist_trace(n_trace, tr.data())) return 1;
    auto of = [&](int phase, int block) { return &tr[(int64_t{phase} * n_blocks + block) * kMarks]; };
    // Marks in ns since the first block had begun; each mark of a phase relative to when the last block had written the phase before.
    const char *names[] = {"qkv", "attend", "o", "gate-up", "down"};
    uint32_t zero_time = of(a.n_phases, 0)[0];
    auto since = [&](long long mark) { return double(static_cast<int32_t>(static_cast<uint32_t>(mark) - zero_time)); };
    const int shift = a.n_phases - 5 * layers - (with_head ? 1 : 0);
    puts("  a phase's marks in ns since the last block had written the phase before: first/mean/last block");
    const char *product_marks[] = {"begin", "seen", "waited", "staged", "product", "sums", "written", "last warp", "sending", "sent"};
    const char *attend_marks[] = {"begin", "seen", "warps", "met", "range", "joined", "block", "taken", "sending", "sent"};
    double total = 0;
    // Where some layers have weights of another format, those and the others by themselves.
    const int n_sorts = tail != format ? 2 : 1;
    for (int sort = 0; sort < n_sorts; ++sort)
        for (int kind = 0; kind < 5; ++kind) {
            double v[kMarks][3] = {}, length = 0;
            int n = 0;
            for (int lay = 2; lay < layers; ++lay) {
                if (lay % n_sorts != sort) continue;
                const int p = shift + lay * 5 + kind;
                auto last_of = [&](int q) {
                    double last = 0;
                    const int m = (q - shift) % 5 == 1 ? 5 : 6;
                    for (int k = 0; k < n_blocks; ++k)
                        if (of(q, k)[m]) last = std::max(last, since(of(q, k)[m]));
                    return last;
                };
                const double zero = last_of(p - 1);
                length += last_of(p) - zero;
                for (int j = 0; j < kMarks; ++j) {
                    double lo = 1e300, hi = -1e300, mean = 0;
                    int c = 0;
                    for (int k = 0; k < n_blocks; ++k) {
                        auto t = of(p, k);
                        if (!t[j] || (j < 8 && !t[4])) continue;
                        const double x = j == 2 && kind != 1 ? t[2] : since(t[j]) - zero;
                        lo = std::min(lo, x);
                        hi = std::max(hi, x);
                        mean += x;
                        ++c;
                    }
                    if (c) {
                        v[j][0] += lo;
                        v[j][1] += mean / c;
                        v[j][2] += hi;
                    }
                }
                ++n;
            }
            const int order[2][kMarks] = {{0, 1, 3, 4, 7, 2, 5, 6, 8, 9}, {0, 7, 3, 1, 4, 2, 6, 5, 8, 9}};
            printf("  %-8s length %6.0f |", names[kind], length / n);
            for (int j : order[kind == 1])
                printf(" %s %.0f/%.0f/%.0f", (kind == 1 ? attend_marks : product_marks)[j], v[j][0] / n, v[j][1] / n, v[j][2] / n);
            puts("");
            total += length / n / n_sorts;
        }
    printf("  a layer %.0f ns\n", total);
#endif
    return 0;
}
