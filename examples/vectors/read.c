/* Reads vectors (docs/vectors.md) and holds a softmax of its own against them, without any library:
   cc -O2 -D_GNU_SOURCE -o read read.c -lm && ./read FOLDER. A line has no spaces: a search for "name": finds what follows it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE *arrays;

/* What follows "name": behind a place of a line; NULL where it is not there. */
static const char *field(const char *from, const char *name) {
  char key[64];
  snprintf(key, sizeof key, "\"%s\":", name);
  const char *found = from ? strstr(from, key) : NULL;
  return found ? found + strlen(key) : NULL;
}

/* The bytes of the array whose place comes next behind a field: {"tensor":...,"offset":...,"bytes":...}. */
static void *array_at(const char *place, long *bytes) {
  long offset = strtol(field(place, "offset"), NULL, 10);
  *bytes = strtol(field(place, "bytes"), NULL, 10);
  char *data = malloc(*bytes + 1);
  fseek(arrays, offset, SEEK_SET);
  if (fread(data, 1, *bytes, arrays) != (size_t)*bytes) exit(2);
  return data;
}

static double at(const void *data, long i, int is_double) {
  return is_double ? ((const double *)data)[i] : ((const float *)data)[i];
}

/* One row of a softmax, in float64. A row that is masked throughout gets zeros. */
static void softmax(const void *row, long first, long length, int is_double, double *out) {
  double top = -INFINITY, total = 0;
  for (long j = 0; j < length; j++) top = fmax(top, at(row, first + j, is_double));
  for (long j = 0; j < length; j++) total += out[j] = top == -INFINITY ? 0 : exp(at(row, first + j, is_double) - top);
  for (long j = 0; j < length; j++) out[j] = total == 0 ? 0 : out[j] / total;
}

/* Whether all numbers of a vector of softmax are within the bounds of "native": computed in float64, rounded once. */
static int is_right(const char *line) {
  const char *stage = strstr(line, "\"stages\":");
  int is_double = strstr(line, "\"dtype\":\"float64\"") != NULL, right = 1;
  long bytes, size, length = 1;
  void *scores = array_at(field(line, "data"), &bytes);
  for (const char *axis = field(line, "shape") + 1; axis[-1] != ']'; axis++) length = strtol(axis, (char **)&axis, 10);
  double *exact = array_at(field(stage, "exact"), &size), *low = array_at(field(stage, "low"), &size);
  double *bound = array_at(field(field(stage, "bounds"), "native"), &size), *row = malloc((length + 1) * sizeof *row);
  long count = bytes / (is_double ? 8 : 4);
  for (long i = 0; i < count; i++) {
    if (i % length == 0) softmax(scores, i, length, is_double, row);
    double number = is_double ? row[i % length] : (float)row[i % length];
    int is_same = number == exact[i] || (isnan(number) && isnan(exact[i]));
    right = right && (isinf(bound[i]) || is_same || fabs(number - exact[i] - low[i]) <= bound[i]);
  }
  free(scores), free(exact), free(low), free(bound), free(row);
  return right;
}

int main(int count, char **words) {
  if (count != 2) return fprintf(stderr, "read FOLDER\n"), 2;
  char path[4096];
  snprintf(path, sizeof path, "%s/vectors.safetensors", words[1]);
  arrays = fopen(path, "rb");
  snprintf(path, sizeof path, "%s/vectors.jsonl", words[1]);
  FILE *lines = fopen(path, "r");
  if (!arrays || !lines) return fprintf(stderr, "no vectors in %s\n", words[1]), 2;
  char *line = NULL;
  size_t room = 0;
  int right = 0, wrong = 0, skipped = 0;
  while (getline(&line, &room, lines) > 0) {
    int is_wide = strstr(line, "\"dtype\":\"float64\"") || strstr(line, "\"dtype\":\"float32\"");
    int is_alone = !strstr(line, "\"name\":\"mask\"") && strstr(line, "\"options\":{}");
    if (!strstr(line, "\"function\":\"softmax\"") || !is_wide || !is_alone) skipped++;
    else if (is_right(line)) right++;
    else wrong++, printf("wrong %.*s\n", (int)strcspn(field(line, "id") + 1, "\""), field(line, "id") + 1);
  }
  printf("%d right, %d wrong, %d skipped\n", right, wrong, skipped);
  return wrong || !right;
}
