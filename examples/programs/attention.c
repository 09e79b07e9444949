/* Attention in C, judged by attncheck: cc -O2 -o attention attention.c -lm; attncheck check -i ./attention
   It speaks docs/protocol.md: a line of JSON, then the arrays that it lists. The line has no spaces, so that a search
   for "name": finds a value. Compile with -DBLOCK=16 for a kernel that takes the keys in blocks, as fused ones do. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef BLOCK
#define BLOCK 0
#endif

typedef struct { long shape[4]; int rank; size_t size, bytes; int is_double; char *data; } Array;
static char line[65536];

/* What follows "name": in the line, or NULL. */
static const char *field(const char *name) {
  char key[64];
  snprintf(key, sizeof key, "\"%s\":", name);
  const char *found = strstr(line, key);
  return found ? found + strlen(key) : NULL;
}

/* Reads the array that the line lists next; its entry begins at *entry. */
static Array read_array(const char **entry, char name[32]) {
  Array a = {{1, 1, 1, 1}, 0, 1, 0, 0, NULL};
  char dtype[16];
  sscanf(*entry, "{\"name\":\"%31[^\"]\",\"dtype\":\"%15[^\"]\"", name, dtype);
  const char *at = strstr(*entry, "\"shape\":[") + 9;
  for (; *at != ']'; at += *at == ',') a.size *= a.shape[a.rank++] = strtol(at, (char **)&at, 10);
  *entry = at + 3; /* behind ]}, */
  a.is_double = !strcmp(dtype, "float64");
  a.bytes = a.size * (a.is_double ? 8 : !strcmp(dtype, "float32") ? 4 : 1);
  a.data = malloc(a.bytes + 1);
  if (fread(a.data, 1, a.bytes, stdin) != a.bytes) exit(2);
  return a;
}

static double at(Array a, size_t i) { return a.is_double ? ((double *)a.data)[i] : ((float *)a.data)[i]; }
static double stored(Array a, double x) { return a.is_double ? x : (float)x; }

/* Where element (b, h, i, j) of a mask or bias lies, whose axes of length 1 stand for all. */
static size_t spread(Array a, long b, long h, long i, long j) {
  long at[4] = {b, h, i, j}, where = 0;
  for (int k = 0; k < 4; k++) where = where * a.shape[k] + (a.shape[k] == 1 ? 0 : at[k]);
  return where;
}

static void attend(Array q, Array k, Array v, Array *mask, Array *bias, int causal, double scale, char *out) {
  long B = q.shape[0], H = q.shape[1], L = q.shape[2], D = q.shape[3], G = k.shape[1], S = k.shape[2], W = v.shape[3];
  long block = BLOCK && BLOCK < S ? BLOCK : S;
  double *score = malloc((block + 1) * sizeof *score), *sum = malloc((W + 1) * sizeof *sum);
  for (long b = 0; b < B; b++) for (long h = 0; h < H; h++) for (long i = 0; i < L; i++) {
    size_t row = (b * H + h) * L + i, head = b * G + h / (H / G);
    double top = -INFINITY, total = 0;
    for (long d = 0; d < W; d++) sum[d] = 0;
    for (long first = 0; first < S; first += block) { /* a running maximum and sum, over one block or many */
      long last = first + block < S ? first + block : S;
      double higher = top;
      for (long j = first; j < last; j++) {
        double dot = 0;
        for (long d = 0; d < D; d++) dot = stored(q, dot + at(q, row * D + d) * at(k, (head * S + j) * D + d));
        dot = stored(q, dot * scale);
        if (bias) dot = stored(q, dot + at(*bias, spread(*bias, b, h, i, j)));
        if ((causal && j > i) || (mask && !mask->data[spread(*mask, b, h, i, j)])) dot = -INFINITY;
        score[j - first] = dot;
        if (dot > higher || isnan(dot)) higher = dot;
      }
      double shift = higher == -INFINITY ? 0 : higher, factor = stored(q, exp(top - shift));
      for (long d = 0; d < W; d++) sum[d] = stored(q, sum[d] * factor);
      total = stored(q, total * factor);
      for (long j = first; j < last; j++) {
        double weight = stored(q, exp(score[j - first] - shift));
        total = stored(q, total + weight);
        if (weight == 0) continue; /* a masked value is not read */
        for (long d = 0; d < W; d++) sum[d] = stored(q, sum[d] + weight * at(v, (head * S + j) * W + d));
      }
      top = higher;
    }
    for (long d = 0; d < W; d++) { /* a query without a key gets zeros */
      double mean = total == 0 ? 0 : sum[d] / total;
      if (q.is_double) ((double *)out)[row * W + d] = mean; else ((float *)out)[row * W + d] = (float)mean;
    }
  }
  free(score), free(sum);
}

int main(void) {
  while (fgets(line, sizeof line, stdin)) {
    if (strstr(line, "\"ask\":\"describe\"")) {
      puts("{\"attncheck\":1,\"name\":\"attention in C\",\"version\":\"1.0\","
           "\"functions\":{\"attention\":[\"mask\",\"bias\",\"is_causal\",\"scale\"]},\"dtypes\":[\"float64\",\"float32\"]}");
    } else {
      Array all[5], *mask = NULL, *bias = NULL;
      char name[32];
      int count = 0;
      for (const char *entry = field("arrays") + 1; *entry == '{'; count++) {
        all[count] = read_array(&entry, name);
        if (!strcmp(name, "mask")) mask = &all[count];
        if (!strcmp(name, "bias")) bias = &all[count];
      }
      Array q = all[0], v = all[2];
      size_t bytes = q.size / (q.shape[3] ? q.shape[3] : 1) * v.shape[3] * (q.is_double ? 8 : 4);
      char *out = malloc(bytes + 1);
      const char *causal = field("is_causal"), *scale = field("scale");
      if (strstr(line, "\"function\":\"attention\"")) {
        double factor = scale ? strtod(scale, NULL) : 1 / sqrt((double)q.shape[3]);
        attend(q, all[1], v, mask, bias, causal && *causal == 't', factor, out);
        printf("{\"stages\":[{\"name\":\"output\",\"dtype\":\"%s\",\"shape\":[%ld,%ld,%ld,%ld]}]}\n",
               q.is_double ? "float64" : "float32", q.shape[0], q.shape[1], q.shape[2], v.shape[3]);
        fwrite(out, 1, bytes, stdout);
      } else puts("{\"unsupported\":\"it has attention alone\"}");
      while (count) free(all[--count].data);
      free(out);
    }
    fflush(stdout);
  }
  return 0;
}
