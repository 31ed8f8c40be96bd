// Host side of the pack: the open context, what it knows of packed weights, and what a launch needs.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "../../host/error.h"
#include "../../pack.h"

namespace pk {

// A packed weight as pk_repack left it. Row-major kinds (BF16, F16, FP8) keep rows `row_bytes` apart; block formats are
// tiles of 16 rows (format/unit.cuh). FP8 scales lie behind the weight at `scales`.
struct Packed {
    int32_t format = 0;
    int32_t scale_kind = PK_SCALES_NONE;  // NONE, ROW or BLOCK (128 x 128)
    int64_t rows = 0, cols = 0;
    int64_t padded_rows = 0, padded_cols = 0;
    int64_t row_bytes = 0;
    int64_t scales = 0;        // offset in bytes; f32
    int64_t scale_stride = 0;  // floats from one row of blocks to the next
    int64_t n_bytes = 0;
    int64_t scale_at = 0;  // offset in bytes of the f32 below, for kernels that choose a matrix themselves
    float scale = 1.0f;    // multiplies the product
};

// What the head of a step leaves for every kernel behind it. Lies in device memory.
struct StepInfo {
    uint64_t seq;
    int32_t n_tokens;
    int32_t n_rows;
    int32_t n_samples;
    int32_t ring;  // steps begun
    uint64_t begun_ns;
};

// What the head of a step tells the host, in pinned memory.
struct StepReport {
    uint64_t consumed;  // inputs read by the device
    uint64_t past_seq;  // a step with a row past its context; 0: none that was not told
    int64_t end;        // where that row would have ended
    int32_t row, slot;
};

struct Driver {
    decltype(&cuMemAddressReserve) reserve = nullptr;
    decltype(&cuMemAddressFree) address_free = nullptr;
    decltype(&cuMemCreate) create = nullptr;
    decltype(&cuMemRelease) release = nullptr;
    decltype(&cuMemMap) map = nullptr;
    decltype(&cuMemUnmap) unmap = nullptr;
    decltype(&cuMemSetAccess) set_access = nullptr;
    decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
    decltype(&cuTensorMapEncodeTiled) encode_tiled = nullptr;
};

}  // namespace pk

struct pk_ctx {
    int32_t device = 0;
    int32_t n_processors = 0;
    int32_t capability = 0;  // 90 for 9.0
    bool tries = false;      // kernels, too, that never ran on a card of this architecture
    int64_t l2_bytes = 0;
    int64_t granule_bytes = 0;
    cudaStream_t stream = nullptr;
    pk::Driver driver;
    std::mutex busy;
    std::map<uint64_t, pk::Packed> packed;                                        // by device address
    std::map<uint64_t, std::pair<int64_t, CUmemGenericAllocationHandle>> granules;  // attached ranges
    std::map<uint64_t, int64_t> reserved;
    void *staging = nullptr;  // pinned, for pk_write and pk_repack
    int64_t staging_bytes = 0;
    std::atomic<int64_t> n_allocations{0}, allocated_bytes{0}, n_steps{0}, n_repacked_bytes{0};
};

namespace pk {

// Everything a record's launch may read. max_tokens and max_samples are the bounds the grid is sized by; kernels read the
// true counts from `info`.
struct Launch {
    pk_ctx *ctx = nullptr;
    cudaStream_t stream = nullptr;
    const pk_state *state = nullptr;
    StepInfo *info = nullptr;
    uint64_t ring = 0;  // pinned step inputs
    int64_t ring_bytes = 0;
    int32_t n_ring = 0;
    uint64_t consumed = 0;  // pinned StepReport, and the times behind it
    int32_t max_tokens = 0;
    int32_t max_samples = 0;
    bool decode_only = false;  // every row has one token
    bool overlap = false;      // programmatic dependent launch
    int32_t *counters = nullptr;  // zero between launches
    uint8_t *scratch = nullptr;
    int64_t scratch_bytes = 0;
    uint8_t *share = nullptr;  // what rows begin with the same pages; null: nobody asks
    int32_t share_heads = 0, share_kv_heads = 0;  // of the op that asked
};

// Behind the count of consumed inputs lie begin and end of the last PK_TIMES steps.
constexpr int32_t kTimesAt = 8;
static_assert(sizeof(StepReport) <= 8 * kTimesAt);
constexpr int64_t kConsumedBytes = 8 * kTimesAt + 16 * PK_TIMES;
constexpr int64_t kCounterBytes = 1 << 18;
constexpr int32_t kMaxSampleBlocks = 16;

inline int32_t check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return PK_OK;
    cudaGetLastError();
    return fail(error == cudaErrorMemoryAllocation ? PK_OOM : PK_DEVICE, "%s: %s", what, cudaGetErrorString(error));
}

// Rows a tensor may have in this launch.
inline int64_t bound(const Launch &l, int64_t rows) { return rows == PK_ROWS_T ? l.max_tokens : rows == PK_ROWS_S ? l.max_samples : rows; }

// Whether kernels of this build wait for the one before (wait_dependence() of device.cuh; a build is of one architecture).
#if defined(__CUDA_ARCH_LIST__)
constexpr int kBuiltFor[] = {__CUDA_ARCH_LIST__};
constexpr bool kWaits = kBuiltFor[0] >= 900;
#else
constexpr bool kWaits = false;
#endif

// Launches with programmatic dependence where the architecture has it: the kernel must call wait_dependence() before it
// reads what an earlier kernel wrote.
template <class... P, class... A>
int32_t launch(const Launch &l, const char *name, void (*kernel)(P...), dim3 grid, dim3 block, int64_t shared_bytes, A &&...arguments) {
    if (shared_bytes > 48 * 1024) {
        cudaError_t e = cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
        if (e != cudaSuccess) return check(e, name);
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = l.stream;
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[0].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attribute;
    config.numAttrs = l.overlap && kWaits ? 1 : 0;
    return check(cudaLaunchKernelEx(&config, kernel, P(static_cast<A &&>(arguments))...), name);
}

// One function per op: enqueues a record. `scratch_needed` tells what the record takes for its largest launch.
int32_t launch_prepare(const Launch &l);
int32_t launch_commit(const Launch &l);
int32_t launch_embed(const Launch &l, const pk_op_embed &op);
int32_t launch_norm(const Launch &l, const pk_op_norm &op);
int32_t launch_qkv(const Launch &l, const pk_op_qkv &op);
int32_t launch_gate(const Launch &l, const pk_op_gate &op);
int32_t launch_gather(const Launch &l, const pk_op_gather &op);
int32_t launch_copy(const Launch &l, const pk_op_copy &op);
int32_t launch_add(const Launch &l, const pk_op_add &op);
int32_t launch_sigmoid(const Launch &l, const pk_op_sigmoid &op);
int32_t launch_sample(const Launch &l, const pk_op_sample &op);
int32_t launch_route(const Launch &l, const pk_op_route &op);
int32_t launch_experts(const Launch &l, const pk_op_experts &op);
int32_t launch_delta(const Launch &l, const pk_op_delta &op);
int32_t launch_mamba(const Launch &l, const pk_op_mamba &op);
int32_t launch_conv(const Launch &l, const pk_op_conv &op);
int32_t launch_attention(const Launch &l, const pk_op_attention &op);
int32_t launch_matmul(const Launch &l, const pk_op_matmul &op);

int32_t check_matmul(pk_ctx *ctx, const pk_op_matmul &op, int64_t at);
int32_t check_embed(pk_ctx *ctx, const pk_op_embed &op, int64_t at);
int32_t check_experts(pk_ctx *ctx, const pk_op_experts &op, int64_t at);
int32_t check_mamba(const pk_op_mamba &op, int64_t at);
int32_t check_delta(const pk_op_delta &op, const pk_state &state, int64_t at);
int32_t check_attention(const pk_op_attention &op, int64_t at);
int64_t matmul_scratch(const pk_ctx *ctx, const pk_op_matmul &op, int64_t max_rows);
int64_t attention_scratch(const pk_ctx *ctx, const pk_op_attention &op, int64_t max_rows);
int64_t experts_scratch(const pk_ctx *ctx, const pk_op_experts &op, int64_t max_rows);
int64_t mamba_scratch(const pk_op_mamba &op, int64_t max_tokens);
int64_t delta_scratch(const pk_ctx *ctx, const pk_op_delta &op, int64_t max_tokens);
// Shared prefixes: memory of what is known of a step's rows, whether a state's rows can share, and finding it out for ops like this.
int64_t share_bytes(const pk_state &state);
bool can_share(const pk_state &state);
int32_t share_least();  // positions
bool uses_share(const pk_ctx *ctx, const pk_op_attention &op);
int32_t launch_share(const Launch &l, const pk_op_attention &op);
int64_t sample_scratch(const pk_op_sample &op, int64_t max_rows);

// PK_OK when the current device runs this build's kernels.
int32_t kernels_run();

const Packed *find_packed(pk_ctx *ctx, const pk_tensor &w);

// bf16 rows [rows, padded_cols] of a packed weight, for products with many rows. Enqueued on l.stream.
int32_t launch_dequantize(const Launch &l, const Packed &packed, uint64_t data, int64_t first_row, int64_t n_rows, void *out, int64_t out_row_bytes);

}  // namespace pk
