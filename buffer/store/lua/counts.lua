-- Keys, clock and counters of all scripts, and the account of generated tokens. KEYS[1]: prefix of the run's keys.
-- `args`: the named arguments, listed in each script's head. ARGV[2] and later: bytes that JSON can't hold.
local args = cjson.decode(ARGV[1])

local function key(name) return KEYS[1] .. ':' .. name end

-- Redis's clock, because hosts' clocks may differ; one time for the whole script.
local clock
local function now()
  if not clock then
    local time = redis.call('TIME')
    clock = tonumber(time[1]) + tonumber(time[2]) / 1e6
  end
  return clock
end

-- now() as text, for fields and histories.
local clock_text
local function timestamp()
  clock_text = clock_text or string.format('%.6f', now())
  return clock_text
end

-- Runs a command with any number of arguments, in portions because a Lua call takes at most 8000. A portion is even, for
-- pairs.
local function call_with(command, name, arguments)
  for first = 1, #arguments, 1000 do
    redis.call(command, name, unpack(arguments, first, math.min(first + 999, #arguments)))
  end
end

-- Counters are collected here and written once per script, by `write_counts`.
local pending = {}
local function add(hash, name, by)
  local fields = pending[hash] or {}
  pending[hash] = fields
  fields[name] = (fields[name] or 0) + by
end

-- Runs after each script (scripts.py). A script that reads a counter it has changed must call it first.
local function write_counts()
  for hash, fields in pairs(pending) do
    for name, by in pairs(fields) do
      if by ~= 0 then redis.call('HINCRBY', key(hash), name, by) end
    end
  end
  pending = {}
end

local function count(name, by) add('counters', name, by) end

-- The account of generated tokens: every token that a server reports as sampled is trained, lost for a reason, an answer
-- to an evaluation, or of a group that is ready, leased or in flight (account.lua).
--   account_rows: a number for each row {server, env}; evaluations have the env '', servers beyond MOST_ROWS the name ''
--   account:<row>: tokens generated, trained, evaluated, and lost:<reason>; uses: trained ones as often as they were used
--   unsettled:<server>: its tickets whose end it has not reported, as <row>:<tokens reported>, and :<reason> behind it
--     where these count as lost already; empty before the first report; '@': the server's incarnation
--   account_open: groups whose reports differ, as <row>:<tokens sampled, less those accounted for>
local MOST_ROWS, MOST_OPEN, UNSETTLED_KEPT_S = 4096, 1000, 86400
local rows = {}

local function row_of(server, env)
  local name = cjson.encode({server, env})
  local row = rows[name] or redis.call('HGET', key('account_rows'), name)
  if not row then
    local known = redis.call('HLEN', key('account_rows'))
    if known >= MOST_ROWS and server ~= '' then return row_of('', env == '' and '' or 'others') end
    row = string.format('%d', known + 1)
    redis.call('HSET', key('account_rows'), name, row)
  end
  rows[name] = row
  return row
end

local function add_tokens(row, name, tokens) add('account:' .. row, name, tokens) end

-- Row, tokens reported and reason of loss ('': none) of an unsettled ticket; no row before the first report.
local function read_unsettled(entry)
  local row, tokens, reason = entry:match('^(%d+):(%d+):?(.*)$')
  return row, tonumber(tokens or 0), reason or ''
end

-- The reason for which tokens in flight count as lost at present.
local function lost_in_flight() return redis.call('HEXISTS', key('meta'), 'finished') == 1 and 'run_finished' or '' end

-- Sets what a ticket's server has sampled for it so far: {env = {id = tokens}}. Tickets that are settled are left out.
local function report_tokens(server, sampled)
  local name, reason = key('unsettled:' .. server), lost_in_flight()
  for env, tickets in pairs(sampled) do
    for id, tokens in pairs(tickets) do
      local entry = redis.call('HGET', name, id)
      local row, before, before_reason = read_unsettled(entry or '')
      if entry and (tokens ~= before or reason ~= before_reason) then
        row = row or row_of(server, env)
        add_tokens(row, 'generated', tokens - before)
        if before_reason ~= '' then add_tokens(row, 'lost:' .. before_reason, -before) end
        if reason ~= '' then add_tokens(row, 'lost:' .. reason, tokens) end
        redis.call('HSET', name, id, row .. ':' .. tokens .. (reason ~= '' and ':' .. reason or ''))
      end
    end
  end
end

-- Ends a server's work on a ticket: of `origin.sampled` tokens, `lost` ({reason = tokens}) are lost, and `kept` not. Where
-- other tokens arrived than were sampled, the group's name is kept with the difference. `kept` is nil for an outcome that
-- may be repeated: that has an effect only the first time. Returns the row, '0' without tokens.
local function settle(id, origin, lost, kept)
  local name = key('unsettled:' .. origin.server)
  local entry = redis.call('HGET', name, id)
  if not entry and not kept then return '0' end
  if entry then redis.call('HDEL', name, id) end
  local row, before, reason = read_unsettled(entry or '')
  local sampled, known = origin.sampled, kept or 0
  for _, tokens in pairs(lost) do known = known + tokens end
  if sampled > 0 or known > 0 then row = row or row_of(origin.server, origin.env) end
  if not row then return '0' end
  add_tokens(row, 'generated', sampled - before)
  if reason ~= '' then add_tokens(row, 'lost:' .. reason, -before) end
  for lost_reason, tokens in pairs(lost) do add_tokens(row, 'lost:' .. lost_reason, tokens) end
  if sampled ~= known and redis.call('HLEN', key('account_open')) < MOST_OPEN then
    redis.call('HSET', key('account_open'), id, row .. ':' .. sampled - known)
  end
  return row
end

-- Counts what a server has reported of its unsettled tickets as lost. It may still be alive and report more, or settle them.
local function write_off(server, reason)
  local name = key('unsettled:' .. server)
  local found = redis.call('HGETALL', name)
  for i = 1, #found, 2 do
    local row, tokens, before_reason = read_unsettled(found[i + 1])
    if row and before_reason == '' then
      add_tokens(row, 'lost:' .. reason, tokens)
      redis.call('HSET', name, found[i], row .. ':' .. tokens .. ':' .. reason)
    end
  end
end

-- Forgets an unsettled ticket that its server does not hold: Redis has lost how that ended.
local function forget_unsettled(server, id)
  local entry = redis.call('HGET', key('unsettled:' .. server), id)
  local row, tokens, reason = read_unsettled(entry or '')
  redis.call('HDEL', key('unsettled:' .. server), id)
  if row and reason == '' then add_tokens(row, 'lost:redis_lost', tokens) end
end
