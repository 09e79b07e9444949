# Attention in base R, as the vignette of R's attention package computes it, judged by attncheck:
#     attncheck check -i 'Rscript attention.R'
# It speaks docs/protocol.md: a line of JSON, then the arrays that it lists. R's numbers are float64.

input <- file("stdin", "rb")
output <- pipe("cat", "wb")

read_line <- function() {
  bytes <- raw(0)
  repeat {
    byte <- readBin(input, "raw", 1)
    if (length(byte) == 0) return(NULL)
    if (byte == as.raw(10)) return(rawToChar(bytes))
    bytes <- c(bytes, byte)
  }
}

# The text behind "name": in a line without spaces, up to the comma or brace that ends it; NULL where it is not there.
field <- function(line, name) {
  found <- regmatches(line, regexec(sprintf('"%s":([^,}]*)', name), line))[[1]]
  if (length(found) == 0) NULL else found[2]
}

# Every array that a line lists, read from the input. R keeps the first axis together, C order the last: it is turned.
read_arrays <- function(line) {
  entries <- regmatches(line, gregexpr('\\{"name":"[^"]*","dtype":"[^"]*","shape":\\[[^]]*\\]\\}', line))[[1]]
  arrays <- list()
  for (entry in entries) {
    shape <- as.integer(strsplit(sub('.*\\[([^]]*)\\].*', "\\1", entry), ",")[[1]])
    size <- prod(shape)
    if (grepl('"dtype":"bool"', entry)) numbers <- readBin(input, "raw", size) != as.raw(0)
    else numbers <- readBin(input, "double", size, size = 8, endian = "little")
    name <- sub('.*"name":"([^"]*)".*', "\\1", entry)
    arrays[[name]] <- aperm(array(numbers, rev(shape)), length(shape):1)
  }
  arrays
}

write_stages <- function(stages) {
  listed <- vapply(names(stages), function(name) {
    sprintf('{"name":"%s","dtype":"float64","shape":[%s]}', name, paste(dim(stages[[name]]), collapse = ","))
  }, "")
  writeBin(charToRaw(sprintf('{"stages":[%s]}\n', paste(listed, collapse = ","))), output)
  for (stage in stages) writeBin(as.vector(aperm(stage)), output, size = 8, endian = "little")
  flush(output)
}

say <- function(line) {
  writeBin(charToRaw(paste0(line, "\n")), output)
  flush(output)
}

# One matrix of an array (B, H, i, j), whose axes of length 1 stand for all.
matrix_of <- function(array, batch, head, rows, columns) {
  shape <- dim(array)
  found <- array[min(batch, shape[1]), min(head, shape[2]), , ]
  dim(found) <- shape[3:4]
  found[if (shape[3] == 1) rep(1, rows) else seq_len(rows), if (shape[4] == 1) rep(1, columns) else seq_len(columns),
        drop = FALSE]
}

softmax <- function(scores) {
  rows <- apply(scores, 1, function(row) {
    if (anyNA(row)) return(rep(NaN, length(row)))
    top <- max(row)
    if (top == -Inf) return(rep(0, length(row)))  # a query without a key gets zeros
    powers <- exp(row - top)
    powers / sum(powers)
  })
  dim(rows) <- rev(dim(scores))
  t(rows)
}

attention <- function(arrays, causal, scale) {
  query <- dim(arrays$query); key <- dim(arrays$key); width <- dim(arrays$value)[4]
  rows <- query[3]; columns <- key[3]
  stages <- list(
    scores = array(0, c(query[1:3], columns)), weights = array(0, c(query[1:3], columns)),
    output = array(0, c(query[1:3], width))
  )
  for (batch in seq_len(query[1])) for (head in seq_len(query[2])) {
    shared <- (head - 1) %/% (query[2] / key[2]) + 1
    one <- function(array, at) matrix(array[batch, at, , ], dim(array)[3], dim(array)[4])
    scores <- one(arrays$query, head) %*% t(one(arrays$key, shared)) * scale
    stages$scores[batch, head, , ] <- scores
    if (!is.null(arrays$bias)) scores <- scores + matrix_of(arrays$bias, batch, head, rows, columns)
    if (!is.null(arrays$mask)) scores[!matrix_of(arrays$mask, batch, head, rows, columns)] <- -Inf
    if (causal) scores[col(scores) > row(scores)] <- -Inf
    weights <- softmax(scores)
    values <- one(arrays$value, shared)
    values[colSums(weights != 0 | is.na(weights)) == 0, ] <- 0  # what nobody attends to is not read
    stages$weights[batch, head, , ] <- weights
    stages$output[batch, head, , ] <- weights %*% values
  }
  stages
}

while (!is.null(line <- read_line())) {
  if (grepl('"ask":"describe"', line, fixed = TRUE)) {
    say(paste0('{"attncheck":1,"name":"attention in R","version":"', getRversion(), '",',
               '"functions":{"attention":["mask","bias","is_causal","scale"]},"dtypes":["float64"]}'))
  } else {
    arrays <- read_arrays(line)
    if (!grepl('"function":"attention"', line, fixed = TRUE)) {
      say('{"unsupported":"it has attention alone"}')
      next
    }
    scale <- field(line, "scale")
    scale <- if (is.null(scale)) 1 / sqrt(dim(arrays$query)[4]) else as.numeric(scale)
    write_stages(attention(arrays, identical(field(line, "is_causal"), "true"), scale))
  }
}
