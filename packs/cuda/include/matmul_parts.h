// The matmul op's parts: which of them a record's rows take is decided in src/matmul/matmul.cu.
#pragma once
#include "gemm.cuh"
#include "narrow.cuh"
#include "plain_tops.h"
#include "skinny.cuh"

namespace pk {

constexpr int64_t kPanelBytes = 64 << 20;  // of weights that are unpacked at a time
constexpr int64_t kStreamRows = 64;   // the streaming kernel takes so many rows where there is no wgmma,
constexpr int64_t kDotRows = 2;       // so many where there is,
constexpr int64_t kSkinnyRows = 128;  // and the skinny kernel the rest up to here,
constexpr int64_t kPlainRows = 64;    // or to here, where tiles read the weights as they are;
constexpr int64_t kClusterLeast = 32; // of BF16 and FP8 clusters of blocks take more than these,
constexpr int64_t kFp8Least = 16;     // and of FP8 more than these where they are even products.

inline int64_t align256(int64_t n) { return (n + 255) & ~int64_t{255}; }

// The weights of one record that share a format, as one launch sees them.
struct WeightGroup {
    int first = 0, n = 0;
    int64_t first_column = 0;
};

int n_groups(const pk_op_matmul &op, const Packed *const *packed, WeightGroup *groups);

// Weights that clusters of blocks multiply by fewer rows than other tiles; FP8 by narrowed ones.
bool is_clustered(const Launch &l, int32_t format, int64_t max_rows);
// Rows of a step that flat products take, too, but even ones, by x narrowed, in less time (LOG.md, M61).
bool is_few_even(const Launch &l, const pk_op_matmul &op);

// Packed weights as they lie, by a few rows (src/matmul/packed.cu). A step of min_rows to max_rows; skinny ones: first_row and at most 127 more.
int32_t run_stream(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed, int32_t min_rows, int32_t max_rows);
int32_t run_skinny(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed, int32_t min_rows, int64_t max_rows, int32_t first_row, const Beside &beside = {}, const pk_op_matmul *next = nullptr);

// Tiles (src/matmul/tiled.cu). What one is asked of x and weights as they lie; all weights of a record in one format; the launch, with weights unpacked first where that must be (tops: of an even product of logits).
GemmArguments gemm_arguments(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed, int32_t min_rows);
GemmArguments arguments_of(const Launch &l, const pk_op_matmul &op);
int32_t run_gemm(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed, int32_t min_rows, int64_t max_rows, const Beside &beside = {}, const Handed &handed = {}, const Tops &tops = {});
// Block formats as they are, by more than 32 rows: those from first_row on, when the step has min_rows to max_rows.
int32_t run_even_units(const Launch &l, const pk_op_matmul &op, const WeightGroup &g, const Packed *const *packed, int32_t min_rows, int64_t max_rows, int32_t first_row, const Beside &beside = {});
// x as bf16 in scratch, widened with zeros to whole pieces of 16 bytes.
int32_t narrow_x(const Launch &l, const pk_tensor &x, int64_t max_rows, uint8_t *scratch, pk_tensor *out);

// What a product makes of the norms beside it (squares: room for their sums), and of heads (src/matmul/beside.cu).
HalfNorm half_norm(const Beside &beside, int64_t max_rows, float *squares);
HeadsEnd heads_end(const pk_state &s, const pk_op_qkv &op);

}  // namespace pk
