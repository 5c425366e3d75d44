-- Transitions shared by all scripts, behind counts.lua.

-- Checks that a learner is the run's current one, for the scripts in LEARNER_ONLY (scripts.py). Returns nil if it is or the
-- name is empty, 'superseded' if another learner has taken over, 'unknown' if Redis has no hello of it.
local function check_learner(learner)
  if learner == '' or redis.call('HGET', key('meta'), 'learner') == learner then return nil end
  return redis.call('SISMEMBER', key('learners'), learner) == 1 and 'superseded' or 'unknown'
end

-- Branches of policy versions, in the order of their first versions. A learner that restarts from a checkpoint publishes
-- its weights under a new number, which continues the version in the checkpoint: that begins a branch {first, depth,
-- shared}. A version's depth is the number of publications that lead from the initial weights to its own; `depth` is that
-- of `first`. Undone steps are repeated with the same groups (lease.lua), which leads to the weights of the undone versions
-- again: a later version continues those, too. Where steps could not be repeated it does so only up to the depth `shared`.
local branches
local function all_branches()
  branches = branches or cjson.decode(redis.call('GET', key('branches')) or '[{"first": 0, "depth": 0}]')
  return branches
end

local function set_branches() redis.call('SET', key('branches'), cjson.encode(branches)) end

-- Depth of a version, so that the staleness of its tokens at a later version is the difference of both depths. For a version
-- that was undone and not repeated: as many publications before the last shared version as it is after it.
local function depth_of(version)
  local i = #all_branches()
  while branches[i].first > version do i = i - 1 end
  local depth, shared = branches[i].depth + version - branches[i].first, branches[i].shared
  return shared and depth > shared and 2 * shared - depth or depth
end

-- Depth of a group's stalest token, which may be of any version from its oldest to its newest.
local function group_depth(oldest, newest)
  oldest, newest = tonumber(oldest), tonumber(newest)
  local depth = math.min(depth_of(oldest), depth_of(newest))
  for _, branch in ipairs(all_branches()) do
    if branch.first > oldest and branch.first <= newest then
      depth = math.min(depth, depth_of(branch.first), depth_of(branch.first - 1))
    end
  end
  return depth
end

-- A field of a group's record.
local function field_of(id, field) return redis.call('HGET', key('about:' .. id), field) end

local function state_of(id) return field_of(id, 'state') end

local function append_history(id, event)
  redis.call('RPUSH', key('history:' .. id), timestamp() .. ' ' .. event)
end

-- Moves groups into a state; every transition goes through here. Each group is a table of
--   id, before (its present state; nil: a new group), detail (for the history; nil: none),
--   score: orders the groups in the state: issued and leased by deadline, ready by the sampler's key, trained and durable
--     by the last step that used them, the others by time,
--   depth (into ready only): see group_depth, facts (or nil): further fields of its record as {field, value, ...}.
-- Groups that enter `trained` with more than args.spill_bytes bytes are listed in `to_spill` (spill.py).
local function enter_state_all(state, groups)
  local left, entering, by_version = {}, {}, {}
  for i, group in ipairs(groups) do
    local id, before = group.id, group.before
    if before then
      local leaving = left[before] or {}
      left[before] = leaving
      leaving[#leaving + 1] = id
    end
    entering[2 * i - 1], entering[2 * i] = group.score, id
    if state == 'ready' then by_version[2 * i - 1], by_version[2 * i] = group.depth, id end
    redis.call('HSET', key('about:' .. id), 'state', state, unpack(group.facts or {}))
    if state == 'trained' and redis.call('STRLEN', key('group:' .. id)) > args.spill_bytes then
      redis.call('SADD', key('to_spill'), id)
    end
    append_history(id, group.detail and (state .. ' ' .. group.detail) or state)
  end
  for before, ids in pairs(left) do call_with('ZREM', key(before), ids) end
  if left.ready then call_with('ZREM', key('by_version'), left.ready) end
  call_with('ZADD', key(state), entering)
  call_with('ZADD', key('by_version'), by_version)
end

local function enter_state(id, state, score, detail)
  local depth
  if state == 'ready' then
    local known = redis.call('HMGET', key('about:' .. id), 'oldest', 'newest')
    depth = group_depth(known[1], known[2] or known[1])
  end
  enter_state_all(state, {{id = id, before = state_of(id) or nil, score = score, detail = detail, depth = depth}})
end

-- Adds answers to a length histogram, as {bucket = answers}; `sign` -1 subtracts them.
local function add_lengths(class, lengths, sign)
  for bucket, answers in pairs(lengths) do add('lengths:' .. class, bucket, sign * answers) end
end

local function drop_answers(reason, lengths)
  add_lengths(reason, lengths, 1)
  for _, answers in pairs(lengths) do count('answers_dropped:' .. reason, answers) end
end

-- Sets `streaks`: by task, its latest groups in a row that were all solved, as a positive number, or all unsolved, as a
-- negative one; without an entry for a task whose latest group was mixed.
local function record_streak(task, outcome)
  if outcome == 'mixed' then
    redis.call('HDEL', key('streaks'), task)
    return
  end
  local sign = outcome == 'solved' and 1 or -1
  local streak = tonumber(redis.call('HGET', key('streaks'), task) or 0)
  redis.call('HSET', key('streaks'), task, streak * sign > 0 and streak + sign or sign)
end

-- Counts what a delivered group contains, whether it is used or not (facts: see ledger.py).
local function record_facts(facts)
  count('tokens', facts.tokens)
  add_lengths('delivered', facts.delivered, 1)
  for reason, lengths in pairs(facts.dropped) do drop_answers(reason, lengths) end
  count('answers_dropped:unfinished', facts.missing)
  if facts.outcome then
    local before = redis.call('HGET', key('outcomes'), facts.task)
    if before then count('tasks:' .. before, -1) end
    count('tasks:' .. facts.outcome, 1)
    redis.call('HSET', key('outcomes'), facts.task, facts.outcome)
    record_streak(facts.task, facts.outcome)
  end
end

-- Frees the server's credit when a ticket is no longer in flight.
local function release_ticket(id) redis.call('SREM', key('tickets_of:' .. field_of(id, 'server')), id) end

-- Counts for the rate limit: inserted groups that are still in the buffer, and the uses of these (limiter.py).
local function count_rate(inserts, samples)
  add('meta', 'inserts', inserts)
  add('meta', 'samples', samples)
end

-- Returns inserts and samples; groups in flight count as inserted, leased ones as sampled.
local function rate_counts()
  write_counts()
  local done = redis.call('HMGET', key('meta'), 'inserts', 'samples')
  return tonumber(done[1] or 0) + redis.call('ZCARD', key('issued')),
    tonumber(done[2] or 0) + redis.call('ZCARD', key('leased'))
end

-- Tolerance of the bounds, in uses: 3 * 0.1 > 0.3, and without it a due lease would never be granted.
local ROUNDING = 1e-6

-- Groups that admission (issue.lua) still allows for a server of this policy version (nil: the latest); negative if the
-- pipeline exceeds it. Also returns that version, at most the latest: one that was never published must not widen the
-- capacity. args: max_staleness, groups_per_version, groups_per_step, max_uses, samples_per_insert.
local function capacity(server_version)
  local inserts, samples = rate_counts()
  local leased = redis.call('ZCARD', key('leased'))
  local meta = redis.call('HMGET', key('meta'), 'version', 'consumed', 'throttle')
  local version, consumed = tonumber(meta[1] or 0), tonumber(meta[2] or 0)
  local bound, per_version = math.min(args.max_staleness, tonumber(meta[3] or args.max_staleness)), args.groups_per_version
  server_version = math.min(server_version or version, version)
  -- Uses of a group: at most one in each step before it is too stale, and those that the rate limit allows.
  local uses = math.min(args.max_uses, (bound + 1) * per_version / args.groups_per_step)
  if args.samples_per_insert > 0 then uses = math.min(uses, args.samples_per_insert) end
  uses = math.max(1, uses)
  local pipeline = redis.call('ZCARD', key('issued')) + redis.call('ZCARD', key('ready')) + leased
  -- The uses of leased groups count when they are trained, as in `consumed`.
  local remaining = math.max(pipeline, uses * inserts - (samples - leased))
  local behind = math.max(0, depth_of(version) - depth_of(server_version))
  local left = (bound + 1 - behind) * per_version - consumed
  local allowed = math.floor((left - remaining) / uses + ROUNDING)
  -- Groups that the next step needs are used in it, whatever uses remain to the others. Without them it would never come.
  if left > 0 then allowed = math.max(allowed, args.groups_per_step - pipeline) end
  return allowed, server_version
end

-- Groups that may be issued for a server of this version: the staleness capacity within the rate limit (Reverb's
-- SampleToInsertRatio, arXiv 2102.04736, see limiter.py), 0 after the run's end, and while a restarted learner is about to
-- publish weights of less depth, with which a group would become stale that is generated now. Also returns the version, as
-- `capacity`.
-- args: max_diff, and those of `capacity`.
local function issuable(server_version)
  local allowed, generating = capacity(server_version)
  local per_insert = args.samples_per_insert
  if per_insert > 0 then
    local inserts, samples = rate_counts()
    allowed = math.min(allowed, math.floor((args.max_diff + samples - inserts * per_insert) / per_insert + ROUNDING))
  end
  local meta = redis.call('HMGET', key('meta'), 'finished', 'version', 'resumed_depth')
  local undoes = meta[3] and tonumber(meta[3]) < depth_of(tonumber(meta[2] or 0))
  if meta[1] or undoes then allowed = 0 end
  return math.max(0, allowed), generating
end

-- The outcome of a delivery or failure for a group that is not in flight.
local function late_outcome(id)
  if state_of(id) == 'filtered' or field_of(id, 'oldest') then return 'duplicate' end
  return redis.call('HEXISTS', key('meta'), 'finished') == 1 and 'finished' or 'void'
end

local LATE_REASONS = {duplicate = 'duplicate', finished = 'run_finished', void = 'ticket_expired'}

-- Settles a ticket whose group comes too late, with all its tokens. Returns the outcome.
local function settle_late(outcome, id, origin)
  settle(id, origin, {[LATE_REASONS[outcome]] = origin.sampled})
  return outcome
end

-- Size of a group's bytes in a spill file; its location is <file>:<offset>:<size>:<checksum> (spill.py).
local function spilled_size(location) return tonumber(location:match(':(%d+):%x+$')) end

-- Removes the location of a group's bytes in a spill file, if it has one. The file is removed later, once no group refers to it.
local function remove_location(id)
  local location = redis.call('HGET', key('spilled'), id)
  if not location then return end
  redis.call('HDEL', key('spilled'), id)
  count('spilled_bytes', -spilled_size(location))
end

-- -> filtered(reason) or expired(reason)
local function drop(id, state, reason)
  enter_state(id, state, now(), reason)
  count(state, 1)
  count(state .. ':' .. reason, 1)
  redis.call('DEL', key('group:' .. id), key('arriving:' .. id), key('events:' .. id))
  remove_location(id)
end

-- ready -> expired(reason), of a group that was used before: -> trained.
local function end_uses(id, reason, detail)
  local last = redis.call('ZSCORE', key('used'), id)
  count_rate(-1, -tonumber(field_of(id, 'uses') or 0))
  if last then
    redis.call('ZREM', key('used'), id)
    enter_state(id, 'trained', last, 'no further use: ' .. detail)
  else
    local known = redis.call('HMGET', key('about:' .. id), 'row', 'tokens')
    if known[1] then add_tokens(known[1], 'lost:' .. reason, tonumber(known[2])) end
    drop(id, 'expired', reason)
    drop_answers(reason, cjson.decode(field_of(id, 'lengths')))
  end
end

-- Deletes the records of final groups of one state. `last`: for durable groups, the last step that used one of them; it is kept,
-- because that step can't be undone any more.
local function forget(state, ids, last)
  if #ids == 0 then return end
  if last then
    local before = tonumber(redis.call('HGET', key('meta'), 'forgotten_step') or -1)
    redis.call('HSET', key('meta'), 'forgotten_step', math.max(before, last))
  end
  call_with('ZREM', key(state), ids)
  for _, id in ipairs(ids) do
    redis.call('DEL', key('group:' .. id), key('arriving:' .. id), key('about:' .. id), key('history:' .. id),
      key('steps:' .. id))
    remove_location(id)
  end
end

-- issued -> reissued: the task will be issued again under a new ticket. The old ticket occupies a credit of its server until
-- a heartbeat no longer lists it (heartbeat.lua): the server may still be generating for it. lost_reason: of a lost server's
-- tokens; the events of its episodes go to the new ticket. Without it they are forgotten.
local function reissue(id, why, lost_reason)
  enter_state(id, 'reissued', now(), why)
  count('reissued', 1)
  redis.call('DEL', key('arriving:' .. id))
  local known = redis.call('HMGET', key('about:' .. id), 'epoch', 'position', 'server', 'env', 'event_tokens')
  local place = known[1] .. ':' .. known[2]
  if lost_reason and redis.call('EXISTS', key('events:' .. id)) == 1 then
    hand_over(id, known[3], known[4] or '', tonumber(known[5] or 0), lost_reason)
    redis.call('RPUSH', key('resume'), place .. ':' .. id)
  else
    redis.call('DEL', key('events:' .. id))
    redis.call('RPUSH', key('reissue'), place)
  end
end

-- leased -> ready, trained -> ready, with the group's old key in the sampler's order.
local function return_to_ready(id, why) enter_state(id, 'ready', field_of(id, 'order'), why) end

-- leased -> ready for all groups; ends all leases. Returns the number of groups.
local function end_leases(why)
  for _, step in ipairs(redis.call('ZRANGE', key('leases'), 0, -1)) do redis.call('DEL', key('lease:' .. step)) end
  redis.call('DEL', key('leases'))
  local ids = redis.call('ZRANGE', key('leased'), 0, -1)
  for _, id in ipairs(ids) do return_to_ready(id, why) end
  return #ids
end

-- Counts in the account that `by` uses made it `uses` of a group's tokens: its first use makes them trained.
local function add_uses(row, tokens, uses, by)
  add_tokens(row, 'uses', by * tokens)
  if uses > 0 and uses == by then add_tokens(row, 'trained', tokens) end
  if uses == 0 then add_tokens(row, 'trained', -tokens) end
end

-- leased -> trained, for the groups of all steps up to this one; with uses left: -> ready. `seed`: for the new keys of these
-- in the race. Returns the number of groups.
local function finish_steps(last_step, max_uses, seed)
  math.randomseed(tonumber(seed))
  local race
  local over, again, used, used_again = {}, {}, {}, {}

  local function use(id, step)
    local known = redis.call('HMGET', key('about:' .. id), 'state', 'lengths', 'uses', 'raced', 'weight', 'order', 'oldest',
      'newest', 'row', 'tokens')
    local uses, order = tonumber(known[3] or 0) + 1, known[6]
    redis.call('RPUSH', key('steps:' .. id), step)
    add_lengths('trained', cjson.decode(known[2]), 1)
    if known[9] then add_uses(known[9], tonumber(known[10]), uses, 1) end
    count_rate(0, 1)
    if uses < tonumber(max_uses) then
      if known[4] == '1' then
        -- A new key in the race, as for a new arrival (sampling.py).
        race = race or tonumber(redis.call('HGET', key('meta'), 'race') or 0)
        order = string.format('%.17g', race - math.log(1 - math.random()) / tonumber(known[5]))
      end
      used_again[#used_again + 1] = step
      used_again[#used_again + 1] = id
      again[#again + 1] = {
        id = id, before = known[1], score = order, detail = 'trained at step ' .. step .. ', to be used again',
        depth = group_depth(known[7], known[8] or known[7]), facts = {'uses', uses, 'order', order},
      }
    else
      count_rate(-1, -uses)
      used[#used + 1] = id
      over[#over + 1] = {id = id, before = known[1], score = step, detail = 'at step ' .. step, facts = {'uses', uses}}
    end
  end

  local steps, groups = redis.call('ZRANGEBYSCORE', key('leases'), '-inf', last_step), 0
  for _, step in ipairs(steps) do
    local ids = redis.call('ZRANGE', key('lease:' .. step), 0, -1)
    for _, id in ipairs(ids) do use(id, step) end
    groups = groups + #ids
    redis.call('DEL', key('lease:' .. step), key('undone:' .. step))
  end
  call_with('ZREM', key('leases'), steps)
  call_with('ZADD', key('used'), used_again)
  call_with('ZREM', key('used'), used)
  enter_state_all('ready', again)
  enter_state_all('trained', over)
  count('uses', groups)
  add('meta', 'consumed', groups)
  return groups
end

-- The ticket id of a slice's latest grant: the slice is <first task>:<tasks>, and the n-th grant of slices that begin at
-- this task has the id e<version>-<first task>-<n>, because servers ignore a ticket that they have had.
local function slice_ticket(version, slice)
  local first = slice:match('%d+')
  local times = tonumber(redis.call('HGET', key('eval_handed:' .. version), first))
  local id = 'e' .. version .. '-' .. first
  return times > 1 and (id .. '-' .. times) or id
end

-- Ends the grant of a slice.
local function end_slice(version, slice)
  redis.call('ZREM', key('eval_issued:' .. version), slice)
  redis.call('HDEL', key('eval_holder:' .. version), slice)
end

-- Ends the grant of a slice and makes it available again.
local function return_slice(version, slice)
  end_slice(version, slice)
  redis.call('RPUSH', key('eval_todo:' .. version), slice)
end

-- Counts answered and failed held-out tasks (failures: {reason = tasks}); the last one finishes the evaluation.
local function count_eval_tasks(version, answered, failures)
  local eval, failed = key('eval:' .. version), 0
  for reason, tasks in pairs(failures) do
    if tasks > 0 then redis.call('HINCRBY', eval, 'failed:' .. reason, tasks) end
    failed = failed + tasks
  end
  local done = redis.call('HINCRBY', eval, 'done', answered) + redis.call('HINCRBY', eval, 'failed', failed)
  if done >= tonumber(redis.call('HGET', eval, 'tasks')) then
    redis.call('HSET', eval, 'finished', now())
    redis.call('RPUSH', key('eval_reports'), version)
  end
end

-- Returns the version under evaluation (nil: none) and the slices that a server holds.
local function slices_of(server)
  local version, mine = redis.call('HGET', key('meta'), 'evaluated'), {}
  if not version then return version, mine end
  local holders = redis.call('HGETALL', key('eval_holder:' .. version))
  for i = 1, #holders, 2 do
    if holders[i + 1] == server then mine[#mine + 1] = holders[i] end
  end
  return version, mine
end

-- Reissues all tickets of a server and returns its slices; the tokens that it reported for them are lost for `reason`.
-- Returns the numbers of tickets and slices.
local function reissue_all(server, why, reason)
  write_off(server, reason)
  local tickets = 0
  for _, id in ipairs(redis.call('SMEMBERS', key('tickets_of:' .. server))) do
    if state_of(id) == 'issued' then
      reissue(id, why, reason)
      tickets = tickets + 1
    end
  end
  redis.call('DEL', key('tickets_of:' .. server))
  local version, slices = slices_of(server)
  for _, slice in ipairs(slices) do return_slice(version, slice) end
  return tickets, #slices
end

-- Reissues everything a server holds and removes the server. It may return with its tickets (join.lua), so what is known of
-- these is kept for a while.
local function remove_server(server, why, reason)
  redis.call('ZREM', key('heard'), server)
  redis.call('HDEL', key('incarnations'), server)
  redis.call('EXPIRE', key('unsettled:' .. server), UNSETTLED_KEPT_S)
  return reissue_all(server, why, reason)
end
