#!/usr/bin/env bash
# autocannon 9.0.0: with a rate (-R) the median of answers of 2 s is 1 s and the fastest takes 1 ms: 20 requests make 40,000 latencies.
#
# Guess: the percentiles are those of the requests, or a correction adds a request for each one that the rate missed.
# Seen: 4 connections, 20 requests, each answered after 2.0 s. Without -R all percentiles are 2.0 s. With -R 4 the minimum is 1 ms, the median
#   1.0 s and the mean 1.0 s, of some 40,000 latencies. The correction of coordinated omission adds one for each ms that a request takes,
#   where the rate asks for one a second on each connection. `--ignoreCoordinatedOmission` says 2.0 s. The report has no mark.
# Who is hurt: latency of an LLM server at a given rate. Answers take seconds, and median and mean are half of what every client waits.
#
# Needs bash, node and npm (20 or later); a minute. Exits 1 if the behaviour changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm install --silent --no-audit --no-fund --no-update-notifier --prefix "$work" autocannon@9.0.0 >"$work/npm" 2>&1 || { cat "$work/npm"; exit 2; }
cat > "$work/measure.js" <<'JS'
const { execFile } = require('node:child_process')
const { createServer } = require('node:http')

// An answer of eight events, one every 0.25 s.
const server = createServer((request, response) => {
  request.resume()
  response.writeHead(200, { 'content-type': 'text/event-stream' })
  let sent = 0
  const timer = setInterval(() => {
    response.write('data: {}\n\n')
    if (++sent === 8) { clearInterval(timer); response.end() }
  }, 250)
})

server.listen(0, '127.0.0.1', async () => {
  console.log('autocannon', require('autocannon/package.json').version)
  const told = {}
  for (const flags of ['', '-R 4', '-R 4 --ignoreCoordinatedOmission']) {
    const words = ['node_modules/.bin/autocannon', '-j', '-n', '-c', '4', '-a', '20', '-m', 'POST', ...flags.split(' ').filter(Boolean)]
    const report = await new Promise((resolve, reject) => execFile(process.execPath, [...words, `http://127.0.0.1:${server.address().port}`],
      (error, stdout) => error ? reject(error) : resolve(JSON.parse(stdout))))
    const { min, p50, average, max, totalCount } = told[flags] = report.latency
    console.log(`${flags || 'no flags'}: ${report['2xx']} answers, ${totalCount} latencies: minimum ${min}, median ${p50}, mean ${average}, maximum ${max} ms`)
  }
  server.close()
  const whole = latency => latency.totalCount === 20 && latency.min > 1950
  const made = told['-R 4']
  process.exitCode = whole(told['']) && whole(told['-R 4 --ignoreCoordinatedOmission']) && made.totalCount > 20000 && made.min < 10 && made.p50 < 1300 ? 0 : 1
})
JS
node "$work/measure.js"
