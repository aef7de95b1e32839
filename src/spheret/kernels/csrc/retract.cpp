// The retraction of float32 rows on the CPU, as the operators that spheret/kernels/ops.py defines.
//
//   w = s (f - c h),  c = <h,f>/|h|^2,  beta = |w|/|h|,  theta = p arctan(beta/p)
//   h' = cos(theta) h + sin(theta)/beta w                      (arXiv 2608.02668; geometry/retraction.py)
//
// Each tensor moves once in each direction. A small group of rows is measured, its angles are computed together, and
// it is written while it is still in the cache. A row belongs to one thread and sums over rows are taken in blocks of
// fixed size, so the bits do not depend on the number of threads.
//
// Statistics are float32 where no square can overflow or vanish ("plain" rows), float64 elsewhere ("wide" rows).
// Of a row only c is kept for the backward pass, rounded to float32; the rest comes out of the pass over h, f and the
// gradient that the backward pass makes anyway.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using Vec = at::vec::Vectorized<float>;
using Wide = at::vec::Vectorized<double>;

constexpr int64_t kBlock = 32;              // rows whose gradients of alpha, p and radius are added together
constexpr int64_t kForwardGroup = 1024;     // numbers of h in a group: it and what comes next stay in the first cache
constexpr int64_t kBackwardGroup = 12288;   // the backward pass has six rows to a row of h: they stay in the second
constexpr int64_t kLeastRows = 4;           // rows to a group, whatever their width
constexpr int64_t kParallelFrom = 1 << 14;  // numbers of h: below, waking a second thread costs more than it saves
constexpr int64_t kStreamFrom = 1 << 21;    // numbers of h: dh is not read before the caches have forgotten it
constexpr double kSmallest = 1e-25, kLargest = 1e25;  // between them every product of two statistics is a normal float
constexpr double kLogPMin = -3.0, kLogPMax = 5.0;     // geometry.LOG_P_RANGE

std::atomic<bool> one_thread{false};

// --- the scalars of a call ---

struct Scalars {
  double step;    // alpha lambda_l
  double p;       // exponent, in (0, inf]
  double radius;  // NaN keeps the norm of h
  bool keeps_norm() const { return std::isnan(radius); }
};

double number(const Tensor& t, const char* name) {
  TORCH_CHECK(t.numel() == 1, name, " has ", t.numel(), " elements: this kernel takes one");
  return t.item().toDouble();
}

Scalars scalars(const Tensor& alpha, const Tensor& p, const std::optional<Tensor>& radius, double lambda_l, bool log_p) {
  const double exponent = number(p, "p");
  // std::clamp keeps NaN.
  return {number(alpha, "alpha") * lambda_l,
          log_p ? std::exp(std::clamp(exponent, kLogPMin, kLogPMax)) : exponent,
          radius ? number(*radius, "radius") : std::numeric_limits<double>::quiet_NaN()};
}

// --- a row as vectors ---

// Calls body(j, count) for the numbers [j, j + count) of a row; count is a whole vector but for the last.
template <typename Body>
inline __attribute__((always_inline)) void for_vectors(int64_t d, const Body& body) {
  int64_t j = 0;
  for (; j + Vec::size() <= d; j += Vec::size()) body(j, static_cast<int64_t>(Vec::size()));
  if (j < d) body(j, d - j);
}

inline float total(const Vec& v) {
  return at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return a + b; }, v);
}

// Writes a whole, aligned vector past the caches, where the processor can.
inline void stream(float* to, const Vec& v) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm512_stream_ps(to, v);
#elif defined(CPU_CAPABILITY_AVX2)
  _mm256_stream_ps(to, v);
#else
  v.store(to);
#endif
}

// The gradient of h': that of the stream, plus that of the branch where the branch sends one.
template <bool kBranch>
struct Gradient {
  const float *g, *g_branch;
  Gradient row(int64_t i, int64_t d) const { return {g + i * d, kBranch ? g_branch + i * d : nullptr}; }
  Vec vector(int64_t j, int64_t count) const {
    Vec v = Vec::loadu(g + j, count);
    if constexpr (kBranch) v = v + Vec::loadu(g_branch + j, count);
    return v;
  }
  double number(int64_t j) const { return kBranch ? g[j] + g_branch[j] : g[j]; }
};

// --- measuring rows ---

struct Row {
  double hh, c, zz;  // |h|^2, <h,f>/|h|^2, |z|^2 with z = f - c h
  // Whether float32 holds all that is computed from the row.
  bool plain() const { return kSmallest < hh && hh < kLargest && zz < kLargest && std::abs(c) < 1e12; }
};

Row measure_wide(const float* h, const float* f, int64_t d) {
  double hh = 0, hf = 0, zz = 0;
  for (int64_t j = 0; j < d; ++j) {
    hh += double(h[j]) * h[j];
    hf += double(h[j]) * f[j];
  }
  const double c = hh > 0 ? hf / hh : 0.0;
  for (int64_t j = 0; j < d; ++j) {
    const double z = f[j] - c * h[j];
    zz += z * z;
  }
  return {hh, c, zz};
}

// A row whose update is more radial than tangent: what rounding left of the radial part in z is taken out once more
// (second Gram-Schmidt step), since noise is partly radial and the norm of h' would drift.
Row measure_steep(const float* h, const float* f, int64_t d, float hh, float c, float zz) {
  const float radial = hh * c * c;
  if (!(kSmallest < zz + radial && zz + radial < kLargest)) return measure_wide(h, f, d);
  Vec along(0.f);
  for_vectors(d, [&](int64_t j, int64_t count) {
    const Vec x = Vec::loadu(h + j, count);
    along = along + x * (Vec::loadu(f + j, count) - Vec(c) * x);
  });
  const float hz = total(along), again = hz / hh;
  if (again * hz > 1e-6f * zz) {
    Vec squares(0.f);
    for_vectors(d, [&](int64_t j, int64_t count) {
      const Vec x = Vec::loadu(h + j, count);
      const Vec z = (Vec::loadu(f + j, count) - Vec(c) * x) - Vec(again) * x;
      squares = squares + z * z;
    });
    zz = total(squares);
  }
  return {hh, double(c) + again, zz};
}

// The row of h' is about to be written: its lines are asked for on the way.
Row measure(const float* h, const float* f, int64_t d, const float* out) {
  Vec squares(0.f), products(0.f);
  for_vectors(d, [&](int64_t j, int64_t count) {
    const Vec x = Vec::loadu(h + j, count);
    __builtin_prefetch(out + j, 1);
    squares = squares + x * x;
    products = products + x * Vec::loadu(f + j, count);
  });
  const float hh = total(squares);
  // A row of one number has no tangent: float64 gives it back to the bit (here and in Forward::write).
  if (d == 1 || !(kSmallest < hh && hh < kLargest)) return measure_wide(h, f, d);
  const float c = total(products) / hh;
  squares = Vec(0.f);
  for_vectors(d, [&](int64_t j, int64_t count) {
    const Vec z = Vec::loadu(f + j, count) - Vec(c) * Vec::loadu(h + j, count);
    squares = squares + z * z;
  });
  const float zz = total(squares);
  if (zz > hh * c * c && kSmallest < zz && zz < kLargest) return {hh, c, zz};
  return measure_steep(h, f, d, hh, c, zz);
}

// --- the angles of a group ---

// One number of each row of a group, padded to whole vectors.
using Column = double[kBlock];

struct Group {
  Column hh, c, zz;        // of Row
  Column beta;             // |w|/|h|
  Column cos, sinc, slope;  // cos(theta), sin(theta)/beta, d theta/d beta

  void set(int64_t r, const Row& row, double step) {
    hh[r] = row.hh, c[r] = row.c, zz[r] = row.zz;
    beta[r] = std::abs(step) * std::sqrt(row.zz / (row.hh > 0 ? row.hh : 1.0));
  }
  Row row(int64_t r) const { return {hh[r], c[r], zz[r]}; }
};

// theta and slope (rows,), unless null, take the place of those of p.
void rotate(Group& rows, int64_t count, double p, const double* theta, const double* slope) {
  for (int64_t r = 0; r < count; r += Wide::size()) {
    const int64_t n = std::min<int64_t>(Wide::size(), count - r);
    const Wide beta = Wide::loadu(rows.beta + r), u = beta / Wide(p);
    // Where u is tiny, as at p = inf, theta is beta itself. A u that is NaN stays NaN.
    const Wide angle = theta ? Wide::loadu(theta + r, n) : Wide::blendv(Wide(p) * u.atan(), beta, u <= Wide(1e-9));
    angle.cos().store(rows.cos + r);
    Wide::blendv(angle.sin() / beta, Wide(1.0), beta <= Wide(1e-18)).store(rows.sinc + r);
    (slope ? Wide::loadu(slope + r, n) : Wide(1.0) / (Wide(1.0) + u * u)).store(rows.slope + r);
  }
}

// d theta / d p = arctan(u) - u/(1 + u^2) with u = beta/p, by its series where the two terms cancel.
void exponent_slopes(const Group& rows, int64_t count, double p, double* slopes) {
  for (int64_t r = 0; r < count; r += Wide::size()) {
    const Wide u = Wide::loadu(rows.beta + r) / Wide(p), q = u * u;
    const Wide series = u * q * (Wide(2. / 3) - q * (Wide(4. / 5) - q * (Wide(6. / 7) - q * Wide(8. / 9))));
    Wide::blendv(u.atan() - u / (Wide(1.0) + q), series, u < Wide(0.02)).store(slopes + r);
  }
}

int64_t group_size(int64_t d, int64_t numbers) { return std::clamp(numbers / d, kLeastRows, kBlock); }

// --- forward ---

struct Forward {
  const float *h, *f;
  float *out, *kept;
  const double* theta;  // (n,), or null
  int64_t n, d;
  Scalars s;

  // out = a h + b z, and the lines of the row that is measured next are asked for.
  void write(int64_t i, const Row& row, double a, double b, int64_t ahead) const {
    const float *x = h + i * d, *y = f + i * d;
    float* to = out + i * d;
    const float c = row.c;
    kept[i] = c;
    if (d > 1 && row.plain() && std::abs(b) < 1e18) {
      // What float32 does not hold of c is taken out of h's coefficient, where it costs nothing.
      const Vec va(static_cast<float>(a - b * (row.c - c))), vb(static_cast<float>(b)), vc(c);
      for_vectors(d, [&](int64_t j, int64_t count) {
        const Vec v = Vec::loadu(x + j, count);
        __builtin_prefetch(x + j + ahead);
        __builtin_prefetch(y + j + ahead);
        (va * v + vb * (Vec::loadu(y + j, count) - vc * v)).store(to + j, count);
      });
    } else {
      // A row of zeros has no direction to rotate and stays.
      for (int64_t j = 0; j < d; ++j) to[j] = row.hh > 0 ? a * x[j] + b * (y[j] - row.c * x[j]) : x[j];
    }
  }

  void rows(int64_t first, int64_t last) const {
    Group group{};
    const int64_t size = group_size(d, kForwardGroup);
    for (int64_t start = first; start < last; start += size) {
      const int64_t count = std::min(size, last - start);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t i = start + r;
        group.set(r, measure(h + i * d, f + i * d, d, out + i * d), s.step);
      }
      rotate(group, count, s.p, theta ? theta + start : nullptr, nullptr);
      for (int64_t r = 0; r < count; ++r) {
        const double scale = s.keeps_norm() ? 1.0 : s.radius / std::sqrt(group.hh[r]);
        write(start + r, group.row(r), scale * group.cos[r], scale * group.sinc[r] * s.step, size * d);
      }
    }
  }
};

// --- backward: the formulas of geometry.retract_vjp ---

template <bool kBranch>
struct Backward {
  Gradient<kBranch> g;
  const float *h, *f, *kept;
  float *dh, *df;
  const double *theta, *slope;  // (n,), or null
  double* dtheta;               // (n,), or null
  int64_t n, d;
  Scalars s;
  bool need_p, streams;

  struct Dots {
    Row row;
    double gh, gz;  // <g,h>, <g,z>
  };

  // df = f_g g + f_h h + f_z z and dh = h_g g - c df + f_h z + h_h h; then the row's gradients of step, theta, radius.
  struct Factors {
    double f_g, f_h, f_z, h_g, h_h, step, theta, radius;
  };

  Dots measure_dots_wide(const Gradient<kBranch>& up, const float* x, const float* y) const {
    const Row row = measure_wide(x, y, d);
    double gh = 0, gz = 0;
    for (int64_t j = 0; j < d; ++j) {
      gh += up.number(j) * x[j];
      gz += up.number(j) * (y[j] - row.c * x[j]);
    }
    return {row, gh, gz};
  }

  Dots measure_dots(int64_t i) const {
    const auto up = g.row(i, d);
    const float *x = h + i * d, *y = f + i * d, c = kept[i];
    Vec squares(0.f), tangent(0.f), along(0.f), across(0.f);
    for_vectors(d, [&](int64_t j, int64_t count) {
      const Vec v = up.vector(j, count), u = Vec::loadu(x + j, count);
      const Vec z = Vec::loadu(y + j, count) - Vec(c) * u;
      squares = squares + u * u;
      tangent = tangent + z * z;
      along = along + v * u;
      across = across + v * z;
    });
    const float hh = total(squares), zz = total(tangent), gh = total(along), gz = total(across);
    const Row row = zz > hh * c * c ? Row{hh, c, zz} : measure_steep(x, y, d, hh, c, zz);
    // A square that vanished is measured again too: z = 0 is told from a z too small to be squared.
    if (!row.plain() || row.zz < kSmallest) return measure_dots_wide(up, x, y);
    return {row, gh, gz - (row.c - c) * gh};
  }

  Factors factors(const Group& rows, int64_t r, double gh, double gz) const {
    const double cos = rows.cos[r], sinc = rows.sinc[r], slope = rows.slope[r], beta = rows.beta[r], zz = rows.zz[r];
    const double inverse = rows.hh[r] > 0 ? 1 / rows.hh[r] : 0.0, root = std::sqrt(inverse);
    const double a1 = gh * inverse, k = sinc * s.step;
    const double scale = s.keeps_norm() ? 1.0 : s.radius * root;
    const double along = s.keeps_norm() ? 0.0 : (cos * gh + k * gz) * root;
    const double m = -slope * k * a1 + (slope * cos - sinc) * (zz > 0 ? gz / zz : 0.0);
    return {scale * k,
            -scale * k * a1,
            scale * s.step * m,
            scale * cos,
            -scale * (s.step * m * zz * inverse + along * root),
            scale * slope * (cos * gz - k * zz * a1),
            beta > 0 ? scale * (cos * gz * s.step / beta - sinc * beta * gh) : 0.0,
            along};
  }

  void write(int64_t i, const Row& row, const Factors& by) const {
    const auto up = g.row(i, d);
    const float *x = h + i * d, *y = f + i * d;
    float *to_h = dh + i * d, *to_f = df + i * d;
    if (row.plain() && std::abs(by.f_z) < 1e18 && std::abs(by.h_h) < 1e18 && std::abs(by.f_g) < 1e18) {
      const float c = row.c;
      const double rest = row.c - c;  // what float32 does not hold of c
      const Vec vc(c), f_g(static_cast<float>(by.f_g)), f_h(static_cast<float>(by.f_h - by.f_z * rest));
      const Vec f_z(static_cast<float>(by.f_z)), h_g(static_cast<float>(by.h_g));
      const Vec h_z(static_cast<float>(by.f_h)), h_h(static_cast<float>(by.h_h - by.f_h * rest));
      for_vectors(d, [&](int64_t j, int64_t count) {
        const Vec v = up.vector(j, count), u = Vec::loadu(x + j, count), z = Vec::loadu(y + j, count) - vc * u;
        const Vec q = f_g * v + f_h * u + f_z * z;
        q.store(to_f + j, count);
        const Vec w = h_g * v - vc * q + h_z * z + h_h * u;
        streams ? stream(to_h + j, w) : w.store(to_h + j, count);
      });
    } else if (row.hh > 0) {
      for (int64_t j = 0; j < d; ++j) {
        const double v = up.number(j), z = y[j] - row.c * x[j], q = by.f_g * v + by.f_h * x[j] + by.f_z * z;
        to_f[j] = q;
        to_h[j] = by.h_g * v - row.c * q + by.f_h * z + by.h_h * x[j];
      }
    } else {  // a row of h without a direction was left alone
      for (int64_t j = 0; j < d; ++j) {
        to_f[j] = 0;
        to_h[j] = s.keeps_norm() ? up.number(j) : 0.0;
      }
    }
  }

  // The rows [first, last) of one block; sums (3,): their gradients of step, p and radius.
  void rows(int64_t first, int64_t last, double* sums) const {
    Group group{};
    Column gh, gz, p_slope, turn{};
    const int64_t size = group_size(d, kBackwardGroup);
    for (int64_t start = first; start < last; start += size) {
      const int64_t count = std::min(size, last - start);
      for (int64_t r = 0; r < count; ++r) {
        const Dots dots = measure_dots(start + r);
        group.set(r, dots.row, s.step);
        gh[r] = dots.gh, gz[r] = dots.gz;
      }
      rotate(group, count, s.p, theta ? theta + start : nullptr, slope ? slope + start : nullptr);
      for (int64_t r = 0; r < count; ++r) {
        const Factors by = factors(group, r, gh[r], gz[r]);
        write(start + r, group.row(r), by);
        const bool alive = group.hh[r] > 0;
        sums[0] += alive ? by.step : 0.0;
        sums[2] += alive ? by.radius : 0.0;
        turn[r] = alive ? by.theta : 0.0;
        if (dtheta) dtheta[start + r] = turn[r];
      }
      if (need_p) {
        exponent_slopes(group, count, s.p, p_slope);
        for (int64_t r = 0; r < count; ++r) sums[1] += turn[r] * p_slope[r];
      }
    }
  }
};

// --- operators ---

// float32 numbers side by side: the tensor itself, or a copy.
Tensor plain(const Tensor& t) { return t.to(at::kFloat).contiguous(); }

std::optional<Tensor> wide(const std::optional<Tensor>& t) {
  return t ? std::optional(t->to(at::kDouble).contiguous()) : std::nullopt;
}

const double* data(const std::optional<Tensor>& t) { return t ? t->const_data_ptr<double>() : nullptr; }

void check(const Tensor& h, const Tensor& f) {
  TORCH_CHECK(h.dim() > 0 && h.size(-1) > 0, "h has shape ", h.sizes(), ": it needs a last dimension of at least 1");
  TORCH_CHECK(h.sizes() == f.sizes(), "h has shape ", h.sizes(), " but f has ", f.sizes(), ": they must be equal");
  TORCH_CHECK(h.scalar_type() != at::kDouble && f.scalar_type() != at::kDouble,
              "float64 rows: this kernel computes in float32; use spheret.retract");
}

void check_rows(const std::optional<Tensor>& t, int64_t n, const char* name) {
  TORCH_CHECK(!t || t->numel() == n, name, " has ", t ? t->numel() : 0, " elements for ", n, " rows");
}

// Calls work(first, last) for whole blocks of rows, on PyTorch's threads where there is enough to do.
template <typename Work>
void for_blocks(int64_t n, int64_t d, const Work& work) {
  const int64_t blocks = (n + kBlock - 1) / kBlock, grain = std::max<int64_t>(1, kParallelFrom / (kBlock * d));
  const auto run = [&](int64_t first, int64_t last) { work(first * kBlock, std::min(n, last * kBlock)); };
  if (one_thread || n * d < kParallelFrom) {
    run(0, blocks);
  } else {
    at::parallel_for(0, blocks, grain, run);
  }
}

std::tuple<Tensor, Tensor, Tensor> retract(const Tensor& h, const Tensor& f, const Tensor& alpha, const Tensor& p,
                                           const std::optional<Tensor>& radius, double lambda_l, bool log_p,
                                           const std::optional<Tensor>& theta,
                                           std::optional<at::ScalarType> branch_dtype) {
  check(h, f);
  const Tensor x = plain(h), y = plain(f);
  const int64_t d = h.size(-1), n = h.numel() / d;
  check_rows(theta, n, "theta");
  const auto angles = wide(theta);
  const Tensor out = at::empty_like(x), kept = at::empty({n}, x.options());
  const Forward loop{x.const_data_ptr<float>(), y.const_data_ptr<float>(), out.mutable_data_ptr<float>(),
                     kept.mutable_data_ptr<float>(), data(angles), n, d, scalars(alpha, p, radius, lambda_l, log_p)};
  for_blocks(n, d, [&](int64_t first, int64_t last) { loop.rows(first, last); });
  return {out.to(h.scalar_type()), branch_dtype ? out.to(*branch_dtype) : at::empty({0}, h.options()), kept};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients retract_backward(const Tensor& g, const std::optional<Tensor>& g_branch, const Tensor& h, const Tensor& f,
                           const Tensor& kept, const Tensor& alpha, const Tensor& p,
                           const std::optional<Tensor>& radius, double lambda_l, bool log_p,
                           const std::optional<Tensor>& theta, const std::optional<Tensor>& slope, bool need_p) {
  check(h, f);
  const int64_t d = h.size(-1), n = h.numel() / d;
  TORCH_CHECK(g.sizes() == h.sizes() && (!g_branch || g_branch->sizes() == h.sizes()),
              "gradients must have the shape of h, ", h.sizes());
  check_rows(kept, n, "kept");
  check_rows(theta, n, "theta");
  check_rows(slope, n, "slope");
  const Tensor x = plain(h), y = plain(f), up = plain(g), c = plain(kept);
  const std::optional<Tensor> up_branch = g_branch ? std::optional(plain(*g_branch)) : std::nullopt;
  const auto angles = wide(theta), slopes = wide(slope);
  const Tensor dh = at::empty_like(x), df = at::empty_like(x);
  const Tensor dtheta = at::empty({theta ? n : 0}, x.options().dtype(at::kDouble));
  const Scalars s = scalars(alpha, p, radius, lambda_l, log_p);
  float* to_h = dh.mutable_data_ptr<float>();
  const bool streams = n * d >= kStreamFrom && d % Vec::size() == 0 &&
                       reinterpret_cast<uintptr_t>(to_h) % (sizeof(float) * Vec::size()) == 0;
  std::vector<double> sums(3 * ((n + kBlock - 1) / kBlock));
  const auto run = [&](auto gradient) {
    const Backward<std::is_same_v<decltype(gradient), Gradient<true>>> loop{
        gradient, x.const_data_ptr<float>(), y.const_data_ptr<float>(), c.const_data_ptr<float>(), to_h,
        df.mutable_data_ptr<float>(), data(angles), data(slopes), theta ? dtheta.mutable_data_ptr<double>() : nullptr,
        n, d, s, need_p, streams};
    for_blocks(n, d, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i += kBlock) loop.rows(i, std::min(last, i + kBlock), &sums[3 * (i / kBlock)]);
    });
  };
  if (up_branch) {
    run(Gradient<true>{up.const_data_ptr<float>(), up_branch->const_data_ptr<float>()});
  } else {
    run(Gradient<false>{up.const_data_ptr<float>(), nullptr});
  }
  double total[3] = {0, 0, 0};
  for (size_t i = 0; i < sums.size(); ++i) total[i % 3] += sums[i];
  return {dh.to(h.scalar_type()),
          df.to(f.scalar_type()),
          at::full_like(alpha, total[0] * lambda_l),
          at::full_like(p, total[1] * (log_p ? s.p : 1.0)),
          radius ? at::full_like(*radius, total[2]) : at::empty({0}, alpha.options()),
          dtheta};
}

// beta of every row (n,), float64, for an angle that is computed elsewhere.
Tensor update_size(const Tensor& h, const Tensor& f, const Tensor& alpha) {
  check(h, f);
  const Tensor x = plain(h), y = plain(f);
  const int64_t d = h.size(-1), n = h.numel() / d;
  const double step = number(alpha, "alpha");
  const Tensor beta = at::empty({n}, x.options().dtype(at::kDouble));
  const float *h0 = x.const_data_ptr<float>(), *f0 = y.const_data_ptr<float>();
  double* to = beta.mutable_data_ptr<double>();
  for_blocks(n, d, [&](int64_t first, int64_t last) {
    Group group{};
    for (int64_t i = first; i < last; ++i) {
      group.set(0, measure(h0 + i * d, f0 + i * d, d, f0 + i * d), step);
      to[i] = group.beta[0];
    }
  });
  return beta;
}

}  // namespace

TORCH_LIBRARY_IMPL(spheret, CPU, m) {
  m.impl("retract", &retract);
  m.impl("retract_backward", &retract_backward);
  m.impl("update_size", &update_size);
}

// In the child of a fork the threads of PyTorch's pool are gone, and waiting for them would never end.
extern "C" void spheret_use_one_thread() { one_thread = true; }
