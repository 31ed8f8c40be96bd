// Captured steps: their records as one graph, with the nodes that a step may leave out.
#include "graph.h"

#include "enqueue.h"

#include <map>

namespace pk {
namespace {

// The nodes behind `last`, one after the other.
int32_t find_tail(pk_program::Graph &g, cudaGraphNode_t last) {
    size_t n = 0;
    if (int32_t e = check(cudaGraphGetEdges(g.graph, nullptr, nullptr, nullptr, &n), "capture")) return e;
    std::vector<cudaGraphNode_t> from(n), to(n);
    std::vector<cudaGraphEdgeData> edges(n);
    if (int32_t e = check(cudaGraphGetEdges(g.graph, from.data(), to.data(), edges.data(), &n), "capture")) return e;
    std::map<cudaGraphNode_t, cudaGraphNode_t> next;
    for (size_t i = 0; i < n; ++i) next[from[i]] = to[i];
    for (auto at = next.find(last); at != next.end(); at = next.find(at->second)) g.tail.push_back(at->second);
    return PK_OK;
}

}  // namespace

int32_t switch_off(const pk_program::Graph &g, const std::vector<cudaGraphNode_t> &nodes, bool off, bool *is_off) {
    if (*is_off == off) return PK_OK;
    for (cudaGraphNode_t node : nodes)
        if (int32_t e = check(cudaGraphNodeSetEnabled(g.exec, node, !off), "step")) return e;
    *is_off = off;
    return PK_OK;
}

void drop(pk_program::Graph &g) {
    if (g.exec) cudaGraphExecDestroy(g.exec);
    if (g.graph) cudaGraphDestroy(g.graph);
    g = {};
}

int32_t capture(pk_program &p, const pk_program::View &view, const Launch &l, bool with_ends, pk_program::Graph *out) {
    cudaStream_t stream = l.stream;
    const bool has_tail = with_ends && p.tail_at > 0 && p.tail_at < p.records.n();
    cudaGraphNode_t last = nullptr;
    if (int32_t e = check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture")) return e;
    int32_t status = enqueue(p, view, l, 0, has_tail ? p.tail_at : p.records.n(), with_ends, &out->passes);
    if (has_tail) last = last_node(stream);
    if (!status && has_tail) status = enqueue(p, view, l, p.tail_at, p.records.n(), with_ends);
    const int32_t ended = check(cudaStreamEndCapture(stream, &out->graph), "capture");
    if (!status) status = ended;
    if (!status && last) status = find_tail(*out, last);
    if (!status) status = check(cudaGraphInstantiate(&out->exec, out->graph, 0), "graph");
    if (out->graph && (status || (!has_tail && out->passes.empty()))) {
        cudaGraphDestroy(out->graph);
        out->graph = nullptr;
    }
    return status ? status : check(cudaGraphUpload(out->exec, stream), "graph");
}

}  // namespace pk
