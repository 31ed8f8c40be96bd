// Experts of a step that the host computes (src/cold): how many of those that are missing, what the device asks, and what the kernels of src/experts/fetch.cu need for it.
#pragma once
#include "../../rare.h"
#include "cold_workers.h"
#include "context.h"
#include "device.cuh"

namespace pk {

// What an expert costs, in microseconds: by PCIe, on the host (and each of its rows there), and a request that is made at all.
struct ColdCosts {
    float copy_us, expert_us, row_us, ask_us;
    int32_t takes_all;  // whatever it costs
};

// How many of n missing experts the host computes while the others are copied, so that the slower of both is done first; the host may take slack_us
// longer. A single one is copied in every other step at least: what is wanted again and again is to find a place.
#ifdef __CUDACC__
__host__ __device__
#endif
inline int32_t cold_share(const ColdCosts &c, int32_t n, float rows_each, int32_t clock, float slack_us) {
    if (c.takes_all || n == 0) return n;
    const float each = c.expert_us + c.row_us * rows_each, ask = c.ask_us - slack_us, even = (n * c.copy_us - ask) / (c.copy_us + each);
    const int32_t low = even > 0.0f ? (even < n ? static_cast<int32_t>(even) : n) : 0;
    int32_t best = 0;
    float least = n * c.copy_us;
    for (int32_t k = low > 1 ? low : 1; k <= low + 1 && k <= n; ++k) {
        const float host = ask + k * each, copies = (n - k) * c.copy_us, both = host > copies ? host : copies;
        if (both < least) {
            best = k;
            least = both;
        }
    }
    return n == 1 && clock % 2 == 0 ? 0 : best;
}

constexpr int32_t kColdMeasured = 8;  // experts

// In device memory. slack_us: by a step's rows, how much longer the host may take than the copies, since the device has more to do until it waits for
// the host; it grows while the host is early, or is not asked, and shrinks when the device waited. ids: what is left of a step's choices for the device, [n_rows, n_used].
struct ColdState {
    uint64_t request;
    int32_t is_asked, is_given_up;
    float slack_us[kColdRows + 1];
    int32_t ids[kColdPairs];
    int32_t words[PK_CACHE_HEAD + 2 * kColdMeasured];  // a head and a list of copies, to measure by
};

// Of a layer's launches. mail null: the host computes nothing.
struct ColdAsk {
    ColdMail *mail;
    ColdState *state;
    const void *x;
    const float *weights;
    int64_t x_stride, weights_stride;
    int32_t x_format, x_cols, layer, reserved;
    ColdCosts costs;
};

#ifdef __CUDACC__
// By a block, when its threads are done with `ids` and `weights` of the mail: x follows, then the number of the request.
__device__ __forceinline__ void ask_host(const ColdAsk &a, int32_t n_rows, int32_t n_used, int32_t n_threads) {
    bf16 *to = reinterpret_cast<bf16 *>(reinterpret_cast<uint8_t *>(a.mail) + kColdXAt);
    const int32_t eights = (a.x_cols + 7) / 8;
    for (int32_t i = threadIdx.x; i < n_rows * eights; i += n_threads) {
        const int32_t t = i / eights, c = (i - t * eights) * 8;
        float v[8];
        for (int32_t e = 0; e < 8; ++e) v[e] = c + e < a.x_cols ? load_as_f32(a.x, t * a.x_stride + c + e, a.x_format) : 0.0f;
        *reinterpret_cast<uint4 *>(to + t * cold_stride(a.x_cols) + c) = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    a.mail->layer = a.layer;
    a.mail->n_rows = n_rows;
    a.mail->n_used = n_used;
    // One fence is enough for what the whole block wrote before it met.
    __threadfence_system();
    *reinterpret_cast<volatile uint64_t *>(&a.mail->request) = a.state->request;
}
#endif

// The op's record is one of the context's layers from here on, if the host can compute its experts at all.
int32_t keep_cold_layer(pk_ctx *ctx, const pk_op_experts_fetched &op);
// What its launches for up to n_rows rows ask; nothing where mail is null.
ColdAsk cold_ask(const Launch &l, const pk_op_experts_fetched &op);
// y += scale times what the host answers.
int32_t launch_cold_sums(const Launch &l, const pk_op_experts &op, const ColdAsk &ask);

// The first n experts to the first slots, n_repeats times, as words (ColdState) say: src/experts/fetch.cu.
int32_t launch_first_copies(pk_ctx *ctx, const pk_expert_cache &cache, int32_t *words, int32_t n, int32_t n_repeats);

// Of programs. Before they are captured: rates are measured. A step of n_tokens that ends when *done is seq; runs without steps hold the threads.
int32_t prepare_cold(pk_ctx *ctx);
void expect_cold(pk_ctx *ctx, const pk_state &state, uint64_t seq, int32_t n_tokens);
void hold_cold(pk_ctx *ctx, int32_t by);
void forget_cold(pk_ctx *ctx);  // the state of a program that is unloaded
// PK_TIMEOUT, once, when the device gave up waiting for the host.
int32_t check_cold(pk_ctx *ctx);
void drop_cold(const pk_ctx *ctx);

}  // namespace pk
