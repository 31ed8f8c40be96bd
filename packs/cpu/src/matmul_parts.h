// A product seen as panels counted through its weights (a gated product: through its first weight; the second goes along).
#pragma once
#include "format/layout.h"
#include "matmul.h"
#include "matmul_kernels.h"

namespace pk {

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

const MatmulKernels &matmul_kernels_of(const Context &context);

struct Parts {
    const pk_op_matmul &op;
    const Layout *layouts[3] = {};
    PanelShape shapes[3] = {};
    int64_t first_panel[4] = {};
    int64_t first_column[3] = {};

    explicit Parts(const pk_op_matmul &record);
    bool is_gated() const { return op.act != PK_ACT_NONE; }
    int64_t n_numbers() const { return first_panel[op.n_w]; }

    struct Place {
        int32_t w;
        int64_t panel;
    };
    Place place(int64_t number) const;
    const uint8_t *data(int32_t w, int64_t panel) const { return reinterpret_cast<const uint8_t *>(op.w[w].data) + panel * shapes[w].panel_bytes; }
    Finish finish(Place place) const;
};

// The path for many rows (matmul_tiles.cpp). uses_tiles: whether a step of n_rows goes that way.
bool uses_tiles(const Context &context, const pk_op_matmul &op, int64_t n_rows);
int64_t tiles_workspace_bytes(const Context &context, const pk_op_matmul &op, int64_t n_rows);
void matmul_tiles(Context &context, const Parts &parts, int64_t n_rows, void *workspace);

}  // namespace pk
