// The one file that knows Python: tensors become TensorViews here, and calls go to the CPU or the CUDA ops by where the
// tensors lie. Shapes and dtypes were checked before (research_engine/kernels); values of CPU tensors are checked here.
#include <pybind11/pybind11.h>

#include "build_info.h"
#include "common/dlpack.h"
#include "common/ops.h"
#include "common/value_checks.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace py = pybind11;

namespace research_engine {
namespace {

DType from_dlpack(dlpack::DataType type) {
  const auto is = [&](uint8_t code, uint8_t bits) { return type.code == code && type.bits == bits; };
  if (is(dlpack::kFloat, 32)) return DType::f32;
  if (is(dlpack::kBfloat, 16)) return DType::bf16;
  if (is(dlpack::kFloat, 16)) return DType::f16;
  if (is(dlpack::kInt, 32)) return DType::i32;
  if (is(dlpack::kInt, 64)) return DType::i64;
  if (is(dlpack::kInt, 8)) return DType::i8;
  if (is(dlpack::kUInt, 8)) return DType::u8;
  if (is(dlpack::kFloat8E4M3FN, 8)) return DType::f8e4m3;
  throw py::type_error("no kernel takes tensors of this dtype");
}

DType from_name(const std::string& name) {
  if (name == "torch.float32") return DType::f32;
  if (name == "torch.bfloat16") return DType::bf16;
  if (name == "torch.float16") return DType::f16;
  if (name == "torch.int32") return DType::i32;
  if (name == "torch.int64") return DType::i64;
  if (name == "torch.int8") return DType::i8;
  if (name == "torch.uint8") return DType::u8;
  if (name == "torch.float8_e4m3fn") return DType::f8e4m3;
  throw py::type_error("no kernel takes tensors of dtype " + name);
}

// torch's table of DLPack functions, from the tensor's type, or null where torch is too old to have one.
const dlpack::ExchangeApi* exchange_api(py::handle tensor) {
  static const dlpack::ExchangeApi* api = [&]() -> const dlpack::ExchangeApi* {
    const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())));
    if (!py::hasattr(type, "__dlpack_c_exchange_api__")) return nullptr;
    const py::object capsule = type.attr("__dlpack_c_exchange_api__");
    const void* table = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    if (!table) throw py::error_already_set();
    const auto* found = static_cast<const dlpack::ExchangeApi*>(table);
    return found->major == 1 ? found : nullptr;
  }();
  return api;
}

TensorView view(py::handle tensor) {
  TensorView result;
  if (tensor.is_none()) return result;
  const auto* api = exchange_api(tensor);
  if (api && api->tensor_from_object) {
    dlpack::Tensor t;
    if (api->tensor_from_object(tensor.ptr(), &t)) throw py::error_already_set();
    if (t.ndim > TensorView::kMaxDims) throw py::value_error("tensors have at most 6 dimensions");
    result.data = static_cast<char*>(t.data) + t.byte_offset;
    result.ndim = t.ndim;
    result.dtype = from_dlpack(t.dtype);
    result.device = t.device.type == dlpack::kCuda ? t.device.id : TensorView::kCpu;
    for (int i = 0; i < t.ndim; ++i) {
      result.shape[i] = t.shape[i];
      result.strides[i] = t.strides[i];
    }
    return result;
  }
  const auto shape = tensor.attr("shape").cast<py::tuple>(), strides = tensor.attr("stride")().cast<py::tuple>();
  if (shape.size() > TensorView::kMaxDims) throw py::value_error("tensors have at most 6 dimensions");
  result.data = reinterpret_cast<void*>(tensor.attr("data_ptr")().cast<uintptr_t>());
  result.ndim = static_cast<int>(shape.size());
  result.dtype = from_name(py::str(tensor.attr("dtype")));
  result.device = tensor.attr("get_device")().cast<int>();
  for (int i = 0; i < result.ndim; ++i) {
    result.shape[i] = shape[i].cast<int64_t>();
    result.strides[i] = strides[i].cast<int64_t>();
  }
  return result;
}

// A tensor that the op writes: each element has a place of its own.
TensorView written(const char* name, py::handle tensor) {
  const TensorView result = view(tensor);
  check_written(name, result);
  return result;
}

struct Named {
  const char* name;
  const TensorView& tensor;
};

void require_one_device(std::initializer_list<Named> tensors) {
  const auto place = [](const TensorView& t) {
    return t.device == TensorView::kCpu ? std::string("cpu") : "cuda:" + std::to_string(t.device);
  };
  const Named& first = *tensors.begin();
  for (const Named& other : tensors)
    if (other.tensor && first.tensor && other.tensor.device != first.tensor.device)
      throw py::value_error(std::string(other.name) + " is on " + place(other.tensor) + ", " + first.name + " on " +
                            place(first.tensor) + ": all have to be on one device");
}

// Runs `on_cpu`, or `on_cuda` with the stream, by the device of `where`; the interpreter's lock is released.
#ifdef RESEARCH_ENGINE_WITH_CUDA
#define RESEARCH_ENGINE_DISPATCH(where, on_cpu, on_cuda)       \
  do {                                                         \
    py::gil_scoped_release unlocked;                           \
    if ((where).device == TensorView::kCpu) { on_cpu; }        \
    else { [[maybe_unused]] Stream stream = reinterpret_cast<Stream>(stream_address); on_cuda; } \
  } while (false)
#else
#define RESEARCH_ENGINE_DISPATCH(where, on_cpu, on_cuda)       \
  do {                                                         \
    py::gil_scoped_release unlocked;                           \
    if ((where).device != TensorView::kCpu) refuse_cuda();     \
    (void)stream_address;                                      \
    on_cpu;                                                    \
  } while (false)

[[noreturn]] void refuse_cuda() {
  throw std::runtime_error(
      "this build of research_engine has no CUDA ops, since nvcc was not found when it was built: install the CUDA toolkit, put its "
      "nvcc on PATH (or set CUDA_HOME), and run `pip install -e .` again; `research-engine doctor` shows what was built");
}
#endif

// None, or (kernel, threads, shared bytes, blocks a multiprocessor, keys, bytes of parameters).
KernelVariant kernel_variant(py::handle numbers) {
  KernelVariant variant;
  if (numbers.is_none()) return variant;
  const auto given = numbers.cast<std::tuple<uintptr_t, int, int, int, int, int>>();
  variant.kernel = reinterpret_cast<void*>(std::get<0>(given));
  std::tie(std::ignore, variant.threads, variant.shared_bytes, variant.blocks_per_sm, variant.keys, variant.parameter_bytes) = given;
  return variant;
}

void paged_attention(py::handle query, py::handle key_cache, py::handle value_cache, py::handle block_tables,
                     py::handle query_start_loc, py::handle seq_lens, py::handle out, py::handle lse, py::handle alibi_slopes,
                     py::handle sinks, py::handle key_scale, py::handle value_scale, py::handle workspace, float scale, bool causal, int64_t sliding_window, float softcap,
                     int64_t max_query_len, int64_t max_seq_len, int path, int64_t split_size, py::handle variant,
                     uintptr_t stream_address) {
  PagedAttention args;
  args.query = view(query);
  args.key_cache = view(key_cache);
  args.value_cache = view(value_cache);
  args.block_tables = view(block_tables);
  args.query_start_loc = view(query_start_loc);
  args.seq_lens = view(seq_lens);
  args.out = written("out", out);
  args.lse = view(lse);
  args.alibi_slopes = view(alibi_slopes);
  args.sinks = view(sinks);
  args.key_scale = view(key_scale);
  args.value_scale = view(value_scale);
  args.workspace = view(workspace);
  require_one_device({{"query", args.query}, {"key_cache", args.key_cache}, {"value_cache", args.value_cache},
                      {"block_tables", args.block_tables}, {"query_start_loc", args.query_start_loc},
                      {"seq_lens", args.seq_lens}, {"out", args.out}, {"lse", args.lse},
                      {"alibi_slopes", args.alibi_slopes}, {"sinks", args.sinks}, {"key_scale", args.key_scale},
                      {"value_scale", args.value_scale}, {"workspace", args.workspace}});
  args.scale = scale;
  args.causal = causal;
  args.sliding_window = sliding_window;
  args.softcap = softcap;
  args.max_query_len = max_query_len;
  args.max_seq_len = max_seq_len;
  args.path = path;
  args.split_size = split_size;
  args.variant = kernel_variant(variant);
  RESEARCH_ENGINE_DISPATCH(args.query, check_attention_values(args); check_scales("key_scale", args.key_scale);
                           check_scales("value_scale", args.value_scale); cpu::paged_attention(args),
                           cuda::paged_attention(args, stream));
}

#ifdef RESEARCH_ENGINE_WITH_CUDA
int64_t paged_attention_workspace(py::handle query, py::handle key_cache, py::handle block_tables, int path, int64_t split_size,
                                  int64_t max_query_len, int64_t max_seq_len, py::handle variant) {
  PagedAttention args;
  args.query = view(query);
  args.key_cache = args.value_cache = view(key_cache);
  args.block_tables = view(block_tables);
  args.seq_lens.ndim = 1;
  args.seq_lens.shape[0] = args.block_tables.shape[0];
  args.path = path;
  args.split_size = split_size;
  args.variant = kernel_variant(variant);
  args.max_query_len = max_query_len;
  args.max_seq_len = max_seq_len;
  return cuda::paged_attention_workspace(args);
}
#endif

// The values alone, for metadata of a CUDA call that was copied to the host; query and key_cache give shapes only.
void check_paged_attention(py::handle query, py::handle key_cache, py::handle block_tables, py::handle query_start_loc,
                           py::handle seq_lens, int64_t sliding_window, int64_t max_query_len, int64_t max_seq_len) {
  PagedAttention args;
  args.query = view(query);
  args.key_cache = view(key_cache);
  args.block_tables = view(block_tables);
  args.query_start_loc = view(query_start_loc);
  args.seq_lens = view(seq_lens);
  args.sliding_window = sliding_window;
  args.max_query_len = max_query_len;
  args.max_seq_len = max_seq_len;
  check_attention_values(args);
}

void reshape_and_cache(py::handle key, py::handle value, py::handle key_cache, py::handle value_cache, py::handle slot_mapping,
                       py::handle key_scale, py::handle value_scale, uintptr_t stream_address) {
  const TensorView k = view(key), v = view(value), slots = view(slot_mapping);
  const TensorView kc = written("key_cache", key_cache), vc = written("value_cache", value_cache);
  const TensorView ks = view(key_scale), vs = view(value_scale);
  require_one_device({{"key", k}, {"value", v}, {"key_cache", kc}, {"value_cache", vc}, {"slot_mapping", slots},
                      {"key_scale", ks}, {"value_scale", vs}});
  RESEARCH_ENGINE_DISPATCH(k, check_slots(slots, kc.shape[0] * kc.shape[2]); check_scales("key_scale", ks);
                           check_scales("value_scale", vs); cpu::reshape_and_cache(k, v, kc, vc, slots, ks, vs),
                           cuda::reshape_and_cache(k, v, kc, vc, slots, ks, vs, stream));
}

void copy_blocks(py::handle kv_cache, py::handle pairs, uintptr_t stream_address) {
  const TensorView cache = written("kv_cache", kv_cache), p = view(pairs);
  require_one_device({{"kv_cache", cache}, {"pairs", p}});
  RESEARCH_ENGINE_DISPATCH(cache, check_block_pairs(p, cache.shape[2], cache.shape[2], true); cpu::copy_blocks(cache, p),
                           cuda::copy_blocks(cache, p, stream));
}

void swap_blocks(py::handle source, py::handle destination, py::handle pairs, uintptr_t stream_address) {
  const TensorView from = view(source), to = written("destination", destination), p = view(pairs);
  if (from.device != TensorView::kCpu && to.device != TensorView::kCpu)
    require_one_device({{"source", from}, {"destination", to}});
  check_block_pairs(p, from.shape[2], to.shape[2], false);
  const TensorView& where = from.device == TensorView::kCpu ? to : from;
  RESEARCH_ENGINE_DISPATCH(where, cpu::swap_blocks(from, to, p), cuda::swap_blocks(from, to, p, stream));
}

void gather_cache(py::handle key_cache, py::handle value_cache, py::handle block_tables, py::handle start_loc, py::handle starts,
                  py::handle key, py::handle value, py::handle key_scale, py::handle value_scale, uintptr_t stream_address) {
  const TensorView kc = view(key_cache), vc = view(value_cache), tables = view(block_tables), locations = view(start_loc);
  const TensorView first = view(starts), k = written("key", key), v = written("value", value), ks = view(key_scale), vs = view(value_scale);
  require_one_device({{"key_cache", kc}, {"value_cache", vc}, {"block_tables", tables}, {"start_loc", locations},
                      {"starts", first}, {"key", k}, {"value", v}, {"key_scale", ks}, {"value_scale", vs}});
  RESEARCH_ENGINE_DISPATCH(kc, check_gather_values(tables, locations, first, k.shape[0], kc.shape[2], kc.shape[0]);
                           cpu::gather_cache(kc, vc, tables, locations, first, k, v, ks, vs),
                           cuda::gather_cache(kc, vc, tables, locations, first, k, v, ks, vs, stream));
}

void merge_attention_states(py::handle out_a, py::handle lse_a, py::handle out_b, py::handle lse_b, py::handle out, py::handle lse,
                            uintptr_t stream_address) {
  const TensorView oa = view(out_a), la = view(lse_a), ob = view(out_b), lb = view(lse_b);
  const TensorView o = written("out", out), l = written("lse", lse);
  require_one_device({{"out_a", oa}, {"lse_a", la}, {"out_b", ob}, {"lse_b", lb}, {"out", o}, {"lse", l}});
  RESEARCH_ENGINE_DISPATCH(oa, cpu::merge_attention_states(oa, la, ob, lb, o, l),
                           cuda::merge_attention_states(oa, la, ob, lb, o, l, stream));
}

void rms_norm(py::handle x, py::handle weight, py::handle out, float eps, float weight_offset,
              uintptr_t stream_address) {
  const TensorView in = view(x), w = view(weight), result = written("out", out);
  require_one_device({{"x", in}, {"weight", w}, {"out", result}});
  RESEARCH_ENGINE_DISPATCH(in, cpu::rms_norm(in, w, result, eps, weight_offset),
                           cuda::rms_norm(in, w, result, eps, weight_offset, stream));
}

void fused_add_rms_norm(py::handle x, py::handle residual, py::handle weight, float eps, float weight_offset,
                        uintptr_t stream_address) {
  const TensorView in = written("x", x), r = written("residual", residual), w = view(weight);
  require_one_device({{"x", in}, {"residual", r}, {"weight", w}});
  RESEARCH_ENGINE_DISPATCH(in, cpu::fused_add_rms_norm(in, r, w, eps, weight_offset),
                           cuda::fused_add_rms_norm(in, r, w, eps, weight_offset, stream));
}

void rotary_embedding(py::handle positions, py::handle query, py::handle key, py::handle cos_sin, bool interleaved,
                      uintptr_t stream_address) {
  const TensorView p = view(positions), q = written("query", query), k = written("key", key), table = view(cos_sin);
  require_one_device({{"query", q}, {"key", k}, {"positions", p}, {"cos_sin", table}});
  RESEARCH_ENGINE_DISPATCH(q, check_positions(p, table.shape[0]); cpu::rotary_embedding(p, q, k, table, interleaved),
                           cuda::rotary_embedding(p, q, k, table, interleaved, stream));
}

void rotary_and_cache(py::handle positions, py::handle query, py::handle key, py::handle value, py::handle cos_sin,
                      py::handle key_cache, py::handle value_cache, py::handle slot_mapping, bool interleaved, py::handle key_scale,
                      py::handle value_scale, uintptr_t stream_address) {
  const TensorView p = view(positions), q = written("query", query), k = view(key), v = view(value), table = view(cos_sin);
  const TensorView kc = written("key_cache", key_cache), vc = written("value_cache", value_cache), slots = view(slot_mapping);
  const TensorView ks = view(key_scale), vs = view(value_scale);
  require_one_device({{"query", q}, {"key", k}, {"value", v}, {"positions", p}, {"cos_sin", table}, {"key_cache", kc},
                      {"value_cache", vc}, {"slot_mapping", slots}, {"key_scale", ks}, {"value_scale", vs}});
  RESEARCH_ENGINE_DISPATCH(q, check_positions(p, table.shape[0]); check_slots(slots, kc.shape[0] * kc.shape[2]);
                           check_scales("key_scale", ks); check_scales("value_scale", vs);
                           cpu::rotary_and_cache(p, q, k, v, table, kc, vc, slots, interleaved, ks, vs),
                           cuda::rotary_and_cache(p, q, k, v, table, kc, vc, slots, interleaved, ks, vs, stream));
}

void silu_and_mul(py::handle x, py::handle out, uintptr_t stream_address) {
  const TensorView in = view(x), result = written("out", out);
  require_one_device({{"x", in}, {"out", result}});
  RESEARCH_ENGINE_DISPATCH(in, cpu::silu_and_mul(in, result), cuda::silu_and_mul(in, result, stream));
}

void skinny_gemm(py::handle x, py::handle weight, py::handle bias, py::handle out, bool gated, bool overlap,
                 uintptr_t stream_address) {
  const SkinnyGemm args{view(x), view(weight), view(bias), written("out", out), gated, overlap};
  require_one_device({{"x", args.x}, {"weight", args.weight}, {"bias", args.bias}, {"out", args.out}});
  RESEARCH_ENGINE_DISPATCH(args.x, cpu::skinny_gemm(args), cuda::skinny_gemm(args, stream));
}

QuantizedWeight quantized_weight(py::handle weight, py::handle scales, py::handle zeros, py::handle offsets, int kind,
                                 int64_t group_size) {
  return {view(weight), view(scales), view(zeros), view(offsets), static_cast<QuantizedKind>(kind), group_size};
}

void quantized_matmul(py::handle x, py::handle weight, py::handle scales, py::handle zeros, py::handle offsets, py::handle bias,
                      py::handle out, py::handle workspace, int kind, int64_t group_size, bool overlap, uintptr_t stream_address) {
  const QuantizedMatmul args{view(x), written("out", out), quantized_weight(weight, scales, zeros, offsets, kind, group_size), view(bias),
                             view(workspace), overlap};
  const QuantizedWeight& w = args.weight;
  require_one_device({{"x", args.x}, {"weight", w.weight}, {"scales", w.scales}, {"zeros", w.zeros}, {"offsets", w.offsets},
                      {"bias", args.bias}, {"out", args.out}, {"workspace", args.workspace}});
  RESEARCH_ENGINE_DISPATCH(args.x, cpu::quantized_matmul(args), cuda::quantized_matmul(args, stream));
}

void dequantize_weight(py::handle weight, py::handle scales, py::handle zeros, py::handle offsets, py::handle out, int kind,
                       int64_t group_size, uintptr_t stream_address) {
  const QuantizedWeight w = quantized_weight(weight, scales, zeros, offsets, kind, group_size);
  const TensorView result = written("out", out);
  require_one_device({{"weight", w.weight}, {"scales", w.scales}, {"zeros", w.zeros}, {"offsets", w.offsets}, {"out", result}});
  RESEARCH_ENGINE_DISPATCH(result, cpu::dequantize_weight(w, result), cuda::dequantize_weight(w, result, stream));
}

void sample(py::handle logits, py::handle temperature, py::handle seeds, py::handle positions, py::handle top_k, py::handle top_p,
            py::handle min_p, py::handle repetition_penalty, py::handle presence_penalty, py::handle frequency_penalty,
            py::handle seen_tokens, py::handle seen_counts, py::handle seen_lengths, py::handle slots, bool count_drawn,
            py::handle bias_tokens, py::handle bias_values, py::handle allowed_tokens, py::handle token_ids, py::handle logprobs,
            py::handle ranks, py::handle top_ids, py::handle top_logprobs, py::handle workspace, uintptr_t stream_address) {
  Sampling args;
  args.count_drawn = count_drawn;
  const struct {
    const char* name;
    py::handle tensor;
    TensorView& target;
  } tensors[] = {
      {"logits", logits, args.logits}, {"temperature", temperature, args.temperature}, {"seeds", seeds, args.seeds},
      {"positions", positions, args.positions}, {"top_k", top_k, args.top_k}, {"top_p", top_p, args.top_p},
      {"min_p", min_p, args.min_p}, {"repetition_penalty", repetition_penalty, args.repetition_penalty},
      {"presence_penalty", presence_penalty, args.presence_penalty},
      {"frequency_penalty", frequency_penalty, args.frequency_penalty}, {"seen_tokens", seen_tokens, args.seen_tokens},
      {"seen_counts", seen_counts, args.seen_counts}, {"seen_lengths", seen_lengths, args.seen_lengths},
      {"slots", slots, args.slots}, {"bias_tokens", bias_tokens, args.bias_tokens},
      {"bias_values", bias_values, args.bias_values}, {"allowed_tokens", allowed_tokens, args.allowed_tokens},
      {"token_ids", token_ids, args.token_ids}, {"logprobs", logprobs, args.logprobs}, {"ranks", ranks, args.ranks},
      {"top_ids", top_ids, args.top_ids}, {"top_logprobs", top_logprobs, args.top_logprobs},
      {"workspace", workspace, args.workspace}};
  for (const auto& [name, tensor, target] : tensors) {
    const bool counted = count_drawn && std::string(name).rfind("seen_", 0) == 0;  // then drawn tokens are entered
    target = counted ? written(name, tensor) : view(tensor);
    require_one_device({{"logits", args.logits}, {name, target}});
  }
  RESEARCH_ENGINE_DISPATCH(args.logits, check_sampling_values(args); cpu::sample(args), cuda::sample(args, stream));
}

#ifdef RESEARCH_ENGINE_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Hand-written kernels behind research_engine.kernels, which checks their arguments: call those.";
  m.attr("built_with_cuda") = kWithCuda;
  m.attr("cuda_archs") = RESEARCH_ENGINE_CUDA_ARCHS;
  m.attr("nvcc_version") = RESEARCH_ENGINE_NVCC_VERSION;
  m.attr("cpu_flags") = RESEARCH_ENGINE_CPU_FLAGS;
  m.attr("cuda_flags") = RESEARCH_ENGINE_CUDA_FLAGS;
  m.attr("compiler") = __VERSION__;
  m.def("paged_attention", &paged_attention);
  m.def("check_paged_attention", &check_paged_attention);
  m.def("check_slots", [](py::handle slots, int64_t capacity) { check_slots(view(slots), capacity); });
  m.def("check_scales", [](const char* name, py::handle scales) { check_scales(name, view(scales)); });
  m.def("check_positions", [](py::handle positions, int64_t limit) { check_positions(view(positions), limit); });
  m.def("check_block_pairs", [](py::handle pairs, int64_t sources, int64_t destinations, bool same_cache) {
    check_block_pairs(view(pairs), sources, destinations, same_cache);
  });
  m.def("check_gather", [](py::handle tables, py::handle start_loc, py::handle starts, int64_t rows, int64_t block_size,
                           int64_t num_blocks) {
    check_gather_values(view(tables), view(start_loc), view(starts), rows, block_size, num_blocks);
  });
  m.def("reshape_and_cache", &reshape_and_cache);
  m.def("copy_blocks", &copy_blocks);
  m.def("swap_blocks", &swap_blocks);
  m.def("rms_norm", &rms_norm);
  m.def("fused_add_rms_norm", &fused_add_rms_norm);
  m.def("rotary_embedding", &rotary_embedding);
  m.def("rotary_and_cache", &rotary_and_cache);
  m.def("silu_and_mul", &silu_and_mul);
  m.def("skinny_gemm", &skinny_gemm);
  m.def("quantized_matmul", &quantized_matmul);
  m.def("dequantize_weight", &dequantize_weight);
  m.def("sample", &sample);
  m.def("gather_cache", &gather_cache);
  m.def("merge_attention_states", &merge_attention_states);
#ifdef RESEARCH_ENGINE_WITH_CUDA
  m.def("paged_attention_workspace", &paged_attention_workspace);
  m.def("sample_workspace", &cuda::sample_workspace);
  m.def("skinny_gemm_rows", &cuda::skinny_gemm_rows);
  m.def("quantized_matmul_workspace", [](int kind, int64_t tokens, int64_t columns, int64_t depth, int device) {
    return cuda::quantized_matmul_workspace(static_cast<QuantizedKind>(kind), tokens, columns, depth, device);
  });
  m.def("load_kernel", [](const std::string& code, const std::string& symbol) {
    return reinterpret_cast<uintptr_t>(cuda::load_kernel(code, symbol));
  });
  m.def("cuda_device_count", &cuda::device_count);
  m.def("cuda_device_description", &cuda::device_description);
#endif
#ifdef _OPENMP
  m.def("num_threads", [] { return omp_get_max_threads(); });
#endif
}

}  // namespace research_engine
