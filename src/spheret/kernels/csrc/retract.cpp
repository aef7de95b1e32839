// The retraction of float32 rows on the CPU, as the operators that spheret/kernels/ops.py defines.
//
//   w = s (f - c h),  c = <h,f>/|h|^2,  beta = |w|/|h|,  theta = p arctan(beta/p)
//   h' = cos(theta) h + sin(theta)/beta w                      (arXiv 2608.02668; geometry/retraction.py)
//
// Forward and backward read or write each tensor once. A small group of rows is measured, its angles are computed
// together, and it is written while it is still in the cache. A row belongs to one thread, and sums over rows are taken
// in blocks of fixed size, so the bits do not depend on the number of threads.
//
// Statistics are float32 where no square can overflow or vanish ("plain" rows), float64 elsewhere ("wide" rows).
// Only c is kept per row for the backward pass, rounded to float32; the backward pass recomputes the rest from h and f,
// which it reads anyway.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using at::vec::fmadd;
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
  double step, p, radius;  // alpha lambda_l; the exponent; NaN keeps the norm of h
  bool keeps_norm() const { return std::isnan(radius); }
};

double number(const Tensor& t, const char* name) {
  TORCH_CHECK(t.numel() == 1, name, " has ", t.numel(), " elements: this kernel takes one");
  return t.scalar_type() == at::kFloat ? *t.const_data_ptr<float>() : t.item().toDouble();
}

// A tensor with the shape and dtype of a scalar argument, holding this number.
Tensor number_like(const Tensor& like, double value) {
  const Tensor t = at::empty_like(like);
  if (t.scalar_type() != at::kFloat) return t.fill_(value);
  *t.mutable_data_ptr<float>() = static_cast<float>(value);
  return t;
}

Scalars scalars(const Tensor& alpha, const Tensor& p, const MaybeTensor& radius, double lambda_l, bool log_p) {
  const double value = number(p, "p"), exponent = log_p ? std::exp(std::clamp(value, kLogPMin, kLogPMax)) : value;
  return {number(alpha, "alpha") * lambda_l, exponent, radius ? number(*radius, "radius") : NAN};
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

// The gradient of h': the gradient of the stream, plus the gradient of the branch if there is one.
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
  double hh, zz;  // |h|^2, |z|^2
  float c;        // z = f - (c + rest) h with c + rest = <h,f>/|h|^2:
  double rest;    // what float32 does not hold of it is kept apart
  double beta(double step) const { return std::abs(step) * std::sqrt(zz / (hh > 0 ? hh : 1.0)); }
  // Whether float32 holds all that is computed from the row.
  bool plain() const { return kSmallest < hh && hh < kLargest && zz < kLargest && std::abs(c + rest) < 1e12; }
};

Row measure_wide(const float* h, const float* f, int64_t d) {
  double hh = 0, hf = 0, zz = 0;
  for (int64_t j = 0; j < d; ++j) hh += double(h[j]) * h[j], hf += double(h[j]) * f[j];
  const double c = hh > 0 ? hf / hh : 0.0;
  for (int64_t j = 0; j < d; ++j) zz += (f[j] - c * h[j]) * (f[j] - c * h[j]);
  const float c1 = std::abs(c) < 1e12 ? c : 0.f;  // float32 may not hold it at all
  return {hh, zz, c1, c - c1};
}

// A row whose update is more radial than tangent: what rounding left of the radial part in z is taken out once more
// (second Gram-Schmidt step), since noise is partly radial and the norm of h' would drift.
Row measure_steep(const float* h, const float* f, int64_t d, float hh, float c, float zz) {
  const float radial = hh * c * c;
  if (!(kSmallest < zz + radial && zz + radial < kLargest)) return measure_wide(h, f, d);
  Vec along(0.f), squares(0.f);
  for_vectors(d, [&](int64_t j, int64_t count) {
    const Vec x = Vec::loadu(h + j, count);
    along = fmadd(x, fmadd(Vec(-c), x, Vec::loadu(f + j, count)), along);
  });
  const float hz = total(along), again = hz / hh;
  for_vectors(again * hz > 1e-6f * zz ? d : 0, [&](int64_t j, int64_t count) {
    const Vec x = Vec::loadu(h + j, count);
    const Vec z = fmadd(Vec(-again), x, fmadd(Vec(-c), x, Vec::loadu(f + j, count)));
    squares = fmadd(z, z, squares);
  });
  return {hh, again * hz > 1e-6f * zz ? total(squares) : zz, c, again};
}

// The row of h' is about to be written: its cache lines are prefetched meanwhile.
Row measure(const float* h, const float* f, int64_t d, const float* out) {
  Vec squares(0.f), products(0.f);
  for_vectors(d, [&](int64_t j, int64_t count) {
    const Vec x = Vec::loadu(h + j, count);
    __builtin_prefetch(out + j, 1);
    squares = fmadd(x, x, squares), products = fmadd(x, Vec::loadu(f + j, count), products);
  });
  const float hh = total(squares);
  if (!(kSmallest < hh && hh < kLargest)) return measure_wide(h, f, d);
  const float c = total(products) / hh;
  squares = Vec(0.f);
  for_vectors(d, [&](int64_t j, int64_t count) {
    const Vec z = fmadd(Vec(-c), Vec::loadu(h + j, count), Vec::loadu(f + j, count));
    squares = fmadd(z, z, squares);
  });
  const float zz = total(squares);
  if (zz > hh * c * c && kSmallest < zz && zz < kLargest) return {hh, zz, c, 0};
  return measure_steep(h, f, d, hh, c, zz);
}

// --- the angles of a group ---

// One number of each row of a group, padded to whole vectors.
using Column = double[kBlock];

struct Group {
  Row row[kBlock];
  Column beta, cos, sinc, slope;  // |w|/|h|, cos(theta), sin(theta)/beta, d theta/d beta

  void set(int64_t r, const Row& measured, double step) { row[r] = measured, beta[r] = measured.beta(step); }
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

  // out = a h + b z; the cache lines of the row that is measured next are prefetched.
  void write(int64_t i, const Row& row, double a, double b, int64_t ahead) const {
    const float *x = h + i * d, *y = f + i * d;
    float* to = out + i * d;
    kept[i] = static_cast<float>(row.c + row.rest);
    if (row.plain() && std::abs(b) < 1e18) {
      const Vec va(static_cast<float>(a)), vb(static_cast<float>(b)), c(-row.c), rest(static_cast<float>(-row.rest));
      for_vectors(d, [&](int64_t j, int64_t count) {
        const Vec v = Vec::loadu(x + j, count);
        __builtin_prefetch(x + j + ahead);
        __builtin_prefetch(y + j + ahead);
        fmadd(va, v, vb * fmadd(rest, v, fmadd(c, v, Vec::loadu(y + j, count)))).store(to + j, count);
      });
    } else {
      // A row of zeros has no direction to rotate and stays.
      const double c = row.c + row.rest;
      for (int64_t j = 0; j < d; ++j) to[j] = row.hh > 0 ? a * x[j] + b * (y[j] - c * x[j]) : x[j];
    }
  }

  void rows(int64_t first, int64_t last) const {
    Group group{};
    const int64_t size = group_size(d, kForwardGroup);
    for (int64_t start = first; start < last; start += size) {
      const int64_t count = std::min(size, last - start);
      for (int64_t i = start; i < start + count; ++i) {
        group.set(i - start, measure(h + i * d, f + i * d, d, out + i * d), s.step);
      }
      rotate(group, count, s.p, theta ? theta + start : nullptr, nullptr);
      for (int64_t r = 0; r < count; ++r) {
        const double scale = s.keeps_norm() ? 1.0 : s.radius / std::sqrt(group.row[r].hh);
        write(start + r, group.row[r], scale * group.cos[r], scale * group.sinc[r] * s.step, size * d);
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

  struct Dots { Row row; double gh, gz; };  // gh = <g,h>, gz = <g,z>

  // df = f_g g + f_h h + f_z z and dh = h_g g - c df + f_h z + h_h h; then the row's gradients of step, theta, radius.
  struct Factors { double f_g, f_h, f_z, h_g, h_h, step, theta, radius; };

  Dots measure_dots(int64_t i) const {
    const auto up = g.row(i, d);
    const float *x = h + i * d, *y = f + i * d, c = kept[i];
    Vec squares(0.f), tangent(0.f), along(0.f), across(0.f);
    for_vectors(d, [&](int64_t j, int64_t count) {
      const Vec v = up.vector(j, count), u = Vec::loadu(x + j, count);
      __builtin_prefetch((streams ? df : dh) + i * d + j, 1);
      __builtin_prefetch(df + i * d + j, 1);
      const Vec z = fmadd(Vec(-c), u, Vec::loadu(y + j, count));
      squares = fmadd(u, u, squares), tangent = fmadd(z, z, tangent);
      along = fmadd(v, u, along), across = fmadd(v, z, across);
    });
    const float hh = total(squares), zz = total(tangent), gh = total(along), gz = total(across);
    const Row row = zz > hh * c * c ? Row{hh, zz, c, 0} : measure_steep(x, y, d, hh, c, zz);
    // A square that vanished is measured again too: z = 0 is told from a z too small to be squared.
    if (row.plain() && row.zz >= kSmallest) return {row, gh, gz - row.rest * gh};
    Dots wide{measure_wide(x, y, d), 0, 0};
    for (int64_t j = 0; j < d; ++j) wide.gh += up.number(j) * x[j];
    for (int64_t j = 0; j < d; ++j) wide.gz += up.number(j) * (y[j] - (wide.row.c + wide.row.rest) * x[j]);
    return wide;
  }

  Factors factors(const Group& rows, int64_t r, double gh, double gz) const {
    const double cos = rows.cos[r], sinc = rows.sinc[r], slope = rows.slope[r], beta = rows.beta[r];
    const double zz = rows.row[r].zz, hh = rows.row[r].hh, inverse = hh > 0 ? 1 / hh : 0.0, root = std::sqrt(inverse);
    const double a1 = gh * inverse, k = sinc * s.step;
    const double scale = s.keeps_norm() ? 1.0 : s.radius * root;
    const double along = s.keeps_norm() ? 0.0 : (cos * gh + k * gz) * root;
    const double m = -slope * k * a1 + (slope * cos - sinc) * (zz > 0 ? gz / zz : 0.0);
    const double theta_slope = beta > 0 ? scale * (cos * gz * s.step / beta - sinc * beta * gh) : 0.0;
    return {scale * k, -scale * k * a1, scale * s.step * m, scale * cos,
            -scale * (s.step * m * zz * inverse + along * root), scale * slope * (cos * gz - k * zz * a1), theta_slope,
            along};
  }

  void write(int64_t i, const Row& row, const Factors& by) const {
    const auto up = g.row(i, d);
    const float *x = h + i * d, *y = f + i * d;
    float *to_h = dh + i * d, *to_f = df + i * d;
    if (row.plain() && std::abs(by.f_z) < 1e18 && std::abs(by.h_h) < 1e18 && std::abs(by.f_g) < 1e18) {
      const Vec c(-row.c), f_g(static_cast<float>(by.f_g)), f_h(static_cast<float>(by.f_h - by.f_z * row.rest));
      const Vec f_z(static_cast<float>(by.f_z)), h_g(static_cast<float>(by.h_g));
      const Vec h_z(static_cast<float>(by.f_h)), h_h(static_cast<float>(by.h_h - by.f_h * row.rest));
      for_vectors(d, [&](int64_t j, int64_t count) {
        const Vec v = up.vector(j, count), u = Vec::loadu(x + j, count), z = fmadd(c, u, Vec::loadu(y + j, count));
        const Vec q = fmadd(f_g, v, fmadd(f_h, u, f_z * z));
        q.store(to_f + j, count);
        const Vec w = fmadd(h_g, v, fmadd(c, q, fmadd(h_z, z, h_h * u)));
        streams ? stream(to_h + j, w) : w.store(to_h + j, count);
      });
    } else if (row.hh > 0) {
      const double c = row.c + row.rest;
      for (int64_t j = 0; j < d; ++j) {
        const double v = up.number(j), z = y[j] - c * x[j], q = by.f_g * v + by.f_h * x[j] + by.f_z * z;
        to_f[j] = q;
        to_h[j] = by.h_g * v - c * q + by.f_h * z + by.h_h * x[j];
      }
    } else {  // a row of h without a direction was left alone
      for (int64_t j = 0; j < d; ++j) to_f[j] = 0, to_h[j] = s.keeps_norm() ? up.number(j) : 0.0;
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
        group.set(r, dots.row, s.step), gh[r] = dots.gh, gz[r] = dots.gz;
      }
      rotate(group, count, s.p, theta ? theta + start : nullptr, slope ? slope + start : nullptr);
      for (int64_t r = 0; r < count; ++r) {
        const Factors by = factors(group, r, gh[r], gz[r]);
        write(start + r, group.row[r], by);
        const bool alive = group.row[r].hh > 0;
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

// The numbers of t side by side in this dtype: t itself, or a copy. (A call that finds nothing to do is not free.)
Tensor plain(const Tensor& t, at::ScalarType dtype = at::kFloat) {
  return t.scalar_type() == dtype && t.is_contiguous() ? t : t.to(dtype).contiguous();
}
MaybeTensor plain(const MaybeTensor& t, at::ScalarType dtype) { return t ? MaybeTensor(plain(*t, dtype)) : t; }

template <typename Number> const Number* data(const MaybeTensor& t) { return t ? t->const_data_ptr<Number>() : nullptr; }

void check(const Tensor& h, const Tensor& f) {
  TORCH_CHECK(h.dim() > 0 && h.size(-1) > 0, "h has shape ", h.sizes(), ": it needs a last dimension of at least 1");
  TORCH_CHECK(h.sizes() == f.sizes(), "h has shape ", h.sizes(), " but f has ", f.sizes(), ": they must be equal");
  TORCH_CHECK(h.scalar_type() != at::kDouble && f.scalar_type() != at::kDouble,
              "float64 rows: this kernel computes in float32; use spheret.retract");
}

void check_rows(const MaybeTensor& t, int64_t n, const char* name) {
  TORCH_CHECK(!t || t->numel() == n, name, " has ", t ? t->numel() : 0, " elements for ", n, " rows");
}

// Calls work(first, last) for whole blocks of rows, on PyTorch's threads where there is enough to do.
template <typename Work>
void for_blocks(int64_t n, int64_t d, const Work& work) {
  const int64_t blocks = (n + kBlock - 1) / kBlock, grain = std::max<int64_t>(1, kParallelFrom / (kBlock * d));
  const auto run = [&](int64_t first, int64_t last) { work(first * kBlock, std::min(n, last * kBlock)); };
  one_thread || n * d < kParallelFrom ? run(0, blocks) : at::parallel_for(0, blocks, grain, run);
}

std::tuple<Tensor, Tensor, Tensor> retract(const Tensor& h, const Tensor& f, const Tensor& alpha, const Tensor& p,
                                           const MaybeTensor& radius, double lambda_l, bool log_p,
                                           const MaybeTensor& theta, std::optional<at::ScalarType> branch_dtype) {
  check(h, f);
  const int64_t d = h.size(-1), n = h.numel() / d;
  check_rows(theta, n, "theta");
  const Tensor x = plain(h), y = plain(f), out = at::empty_like(x), kept = at::empty({n}, x.options());
  const MaybeTensor angles = plain(theta, at::kDouble);
  const Forward loop{x.const_data_ptr<float>(), y.const_data_ptr<float>(), out.mutable_data_ptr<float>(),
                     kept.mutable_data_ptr<float>(), data<double>(angles), n, d,
                     scalars(alpha, p, radius, lambda_l, log_p)};
  for_blocks(n, d, [&](int64_t first, int64_t last) { loop.rows(first, last); });
  const Tensor branch = branch_dtype ? out.to(*branch_dtype, false, true) : at::empty({0}, h.options());
  return {plain(out, h.scalar_type()), branch, kept};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> retract_backward(
    const Tensor& g, const MaybeTensor& g_branch, const Tensor& h, const Tensor& f, const Tensor& kept,
    const Tensor& alpha, const Tensor& p, const MaybeTensor& radius, double lambda_l, bool log_p,
    const MaybeTensor& theta, const MaybeTensor& slope, bool need_p) {
  check(h, f);
  const int64_t d = h.size(-1), n = h.numel() / d, blocks = (n + kBlock - 1) / kBlock;
  TORCH_CHECK(g.sizes() == h.sizes() && (!g_branch || g_branch->sizes() == h.sizes()),
              "gradients must have the shape of h, ", h.sizes());
  check_rows(kept, n, "kept"), check_rows(theta, n, "theta"), check_rows(slope, n, "slope");
  const Tensor x = plain(h), y = plain(f), up = plain(g), c = plain(kept);
  const MaybeTensor up_branch = plain(g_branch, at::kFloat), angles = plain(theta, at::kDouble);
  const MaybeTensor slopes = plain(slope, at::kDouble);
  const Tensor dh = at::empty_like(x), df = at::empty_like(x);
  const Tensor dtheta = at::empty({theta ? n : 0}, x.options().dtype(at::kDouble));
  const Scalars s = scalars(alpha, p, radius, lambda_l, log_p);
  float* to_h = dh.mutable_data_ptr<float>();
  const bool streams = n * d >= kStreamFrom && d % Vec::size() == 0 &&
                       reinterpret_cast<uintptr_t>(to_h) % (sizeof(float) * Vec::size()) == 0;
  std::vector<double> sums(3 * blocks);
  const auto run = [&]<bool kBranch>() {
    const Backward<kBranch> loop{{up.const_data_ptr<float>(), data<float>(up_branch)}, x.const_data_ptr<float>(),
                                 y.const_data_ptr<float>(), c.const_data_ptr<float>(), to_h,
                                 df.mutable_data_ptr<float>(), data<double>(angles), data<double>(slopes),
                                 theta ? dtheta.mutable_data_ptr<double>() : nullptr, n, d, s, need_p, streams};
    for_blocks(n, d, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i += kBlock) loop.rows(i, std::min(last, i + kBlock), &sums[3 * (i / kBlock)]);
    });
  };
  g_branch ? run.template operator()<true>() : run.template operator()<false>();
  double total[3] = {0, 0, 0};
  for (int64_t i = 0; i < 3 * blocks; ++i) total[i % 3] += sums[i];
  return {plain(dh, h.scalar_type()), plain(df, f.scalar_type()), number_like(alpha, total[0] * lambda_l),
          number_like(p, total[1] * (log_p ? s.p : 1.0)),
          radius ? number_like(*radius, total[2]) : at::empty({0}, alpha.options()), dtheta};
}

// beta of every row (n,), float64, as input of a custom angle function.
Tensor update_size(const Tensor& h, const Tensor& f, const Tensor& alpha) {
  check(h, f);
  const Tensor x = plain(h), y = plain(f);
  const int64_t d = h.size(-1), n = h.numel() / d;
  const double step = number(alpha, "alpha");
  const Tensor beta = at::empty({n}, x.options().dtype(at::kDouble));
  const float *h0 = x.const_data_ptr<float>(), *f0 = y.const_data_ptr<float>();
  double* to = beta.mutable_data_ptr<double>();
  for_blocks(n, d, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) to[i] = measure(h0 + i * d, f0 + i * d, d, f0 + i * d).beta(step);
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
