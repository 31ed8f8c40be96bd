// Launches of the even kernel for block formats (even_units.cuh): the instance that a cut wants.
#pragma once
#include "even_launch.cuh"
#include "even_units.cuh"
#include "flat_units_launch.cuh"

namespace pk {

template <int kFormat, int kOther, int kM, int kWidth, int kEnd>
int32_t launch_even_units_shape(const Launch &l, GemmArguments a, const EvenRows &rows, const EvenCut &cut, int others) {
    using S = EvenUnitsShape<kFormat, kOther, kM, kWidth, kEnd>;
    constexpr bool kGated = kEnd == kEndGated || kEnd == kEndGatedCut, kWhole = kEnd == kEndGated || kEnd == kEndWhole;
    constexpr int kWide = kGated ? kWidth / 2 : kWidth;
    CUtensorMap x_map;
    const int32_t left = rows.most - rows.first;
    a.most_rows = std::min(left, kM);
    if (int32_t e = make_map(l, &x_map, a.x, false, left, a.k, a.x_row_bytes, a.most_rows)) return e;
    a.n_tiles = 0;
    for (int i = 0; i < a.n_w; ++i) {
        GemmWeight &w = a.w[i];
        w.scale *= others >> i & 1 ? unit_factor<kOther>() : unit_factor<kFormat>();
        w.first_tile = kGated ? 0 : a.n_tiles;
        if (!kGated || i == 0) a.n_tiles += (w.rows + kWide - 1) / kWide;
    }
    const int blocks = kWhole ? std::min(a.n_tiles, l.ctx->n_processors) : a.n_tiles * cut.n_parts;
    return launch_clusters(l, "gemm_even_units", gemm_even_units_kernel<kFormat, kOther, kM, kWidth, kEnd>, blocks, S::kThreads, S::kBytes, kWhole ? 1 : cut.n_parts, x_map, a, rows, cut.n_squares, others);
}

template <int kFormat, int kM>
int32_t launch_even_units_height(const Launch &l, const GemmArguments &a, const EvenRows &rows, const EvenCut &cut, int others) {
    constexpr int kOther = is_mixed(kFormat) ? kMixedOther : kFormat;
    switch (cut.end) {
        case kEndHeads:
            if (others) return launch_even_units_shape<kFormat, kOther, kM, 128, kEndHeads>(l, a, rows, cut, others);
            return launch_even_units_shape<kFormat, kFormat, kM, 128, kEndHeads>(l, a, rows, cut, 0);
        case kEndGated: return launch_even_units_shape<kFormat, kFormat, kM, 192, kEndGated>(l, a, rows, cut, 0);
        case kEndGatedCut: return launch_even_units_shape<kFormat, kFormat, kM, 192, kEndGatedCut>(l, a, rows, cut, 0);
        case kEndWhole: return launch_even_units_shape<kFormat, kFormat, kM, 192, kEndWhole>(l, a, rows, cut, 0);
        case kEndFront: return launch_even_units_shape<kFormat, kFormat, kM, 128, kEndFront>(l, a, rows, cut, 0);
        default: return launch_even_units_shape<kFormat, kFormat, kM, 128, kEndPlain>(l, a, rows, cut, 0);
    }
}

template <int kFormat>
int32_t launch_even_format(const Launch &l, const GemmArguments &a, const EvenRows &rows, const EvenCut &cut, int others) {
    return rows.most - rows.first <= 64 ? launch_even_units_height<kFormat, 64>(l, a, rows, cut, others) : launch_even_units_height<kFormat, 128>(l, a, rows, cut, others);
}

}  // namespace pk
