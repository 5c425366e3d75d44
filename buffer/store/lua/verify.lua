-- Checks the ledger's invariants, atomically. args: tasks (-1: unknown), most (a ledger of more groups is not checked:
-- 10,000 take 0.2 s; -1: no limit).
-- Returns the violations, one sentence each, at most 1000; none for a sound ledger.
local problems = {}
local function expect(holds, sentence)
  if not holds and #problems < 1000 then problems[#problems + 1] = sentence end
end

local states = {'issued', 'ready', 'leased', 'trained', 'durable', 'filtered', 'expired', 'reissued'}
local remembered = 0
for _, state in ipairs(states) do remembered = remembered + redis.call('ZCARD', key(state)) end
if args.most >= 0 and remembered > args.most then return {} end
local stored = {ready = true, leased = true, trained = true, durable = true}
local members, where, locations = {}, {}, {}
local spilled, spilled_bytes = redis.call('HGETALL', key('spilled')), 0
for i = 1, #spilled, 2 do
  locations[spilled[i]] = spilled[i + 1]
  spilled_bytes = spilled_bytes + (spilled_size(spilled[i + 1]) or 0)
end
for _, state in ipairs(states) do
  members[state] = redis.call('ZRANGE', key(state), 0, -1)
  for _, id in ipairs(members[state]) do
    expect(not where[id], 'group ' .. id .. ' is ' .. state .. ' and ' .. (where[id] or ''))
    where[id] = state
    expect(state_of(id) == state, 'group ' .. id .. ' is ' .. state .. ', but its record has ' .. (state_of(id) or 'nothing'))
    local has_bytes = redis.call('EXISTS', key('group:' .. id)) == 1
    local location = locations[id]
    local is_stored = has_bytes or location ~= nil
    expect(is_stored == (stored[state] or false),
      'group ' .. id .. ' is ' .. state .. (is_stored and ', but still stored' or ', but not stored'))
    expect(state == 'issued' or state == 'reissued' or redis.call('EXISTS', key('events:' .. id)) == 0,
      'group ' .. id .. ' is ' .. state .. ', but events of its episodes are kept')
    expect(not location or state ~= 'leased', 'group ' .. id .. ' is leased, but its bytes are in a spill file')
    expect(not location or location:match('^[%w-]+:%d+:%d+:%x+$'),
      'group ' .. id .. ' has the invalid location ' .. (location or ''))
  end
end

local function counter(name) return tonumber(redis.call('HGET', key('counters'), name) or 0) end
for id in pairs(locations) do expect(where[id], 'group ' .. id .. ' is in a spill file, but in no state') end
expect(counter('spilled_bytes') == spilled_bytes,
  counter('spilled_bytes') .. ' bytes in spill files were counted, but there are ' .. spilled_bytes)
local issued, total = counter('issued'), 0
local parts = {}
for _, state in ipairs(states) do
  -- Of the last four states the ledger keeps only the latest groups (trim.lua); their counters keep all.
  local groups = #members[state]
  if state == 'durable' or state == 'filtered' or state == 'expired' or state == 'reissued' then
    expect(groups <= counter(state), groups .. ' groups are ' .. state .. ', but only ' .. counter(state) .. ' were counted')
    groups = counter(state)
  end
  total = total + groups
  parts[#parts + 1] = groups .. ' ' .. state
end
expect(issued == total, issued .. ' groups were issued, but there are ' .. table.concat(parts, ' + ') .. ' = ' .. total)
if issued ~= total then
  for number = 1, tonumber(redis.call('HGET', key('meta'), 'next_id') or 0) do
    local id = string.format('%d', number)
    expect(where[id] or redis.call('EXISTS', key('about:' .. id)) == 0, 'group ' .. id .. ' is in no state')
  end
end

-- Every drop has a reason.
for _, state in ipairs({'filtered', 'expired'}) do
  local counts, with_reason = redis.call('HGETALL', key('counters')), 0
  for i = 1, #counts, 2 do
    if counts[i]:sub(1, #state + 1) == state .. ':' then with_reason = with_reason + tonumber(counts[i + 1]) end
  end
  expect(counter(state) == with_reason, counter(state) .. ' groups are ' .. state .. ', ' .. with_reason .. ' with a reason')
end

-- Every ticket is for the next task of the cursor that is not skipped, or for a reissued one.
local tasks = args.tasks
local epoch = tonumber(redis.call('HGET', key('meta'), 'epoch') or 0)
local position = tonumber(redis.call('HGET', key('meta'), 'position') or 0)
if tasks >= 0 then
  local skipped = counter('skipped_tasks')
  local drawn = epoch * tasks + position - skipped
  local again = counter('reissued') - redis.call('LLEN', key('reissue')) - redis.call('LLEN', key('resume'))
  expect(issued == drawn + again, issued .. ' tickets were issued for ' .. drawn .. ' tasks and ' .. again ..
    ' repetitions, ' .. skipped .. ' tasks were skipped')
end

for _, id in ipairs(members.issued) do
  local server = field_of(id, 'server') or ''
  expect(redis.call('SISMEMBER', key('tickets_of:' .. server), id) == 1,
    'group ' .. id .. ' is issued to ' .. server .. ', which does not count it')
end
local counted = 0
for _, server in ipairs(redis.call('ZRANGE', key('heard'), 0, -1)) do
  for _, id in ipairs(redis.call('SMEMBERS', key('tickets_of:' .. server))) do
    local over = where[id] == 'reissued' or not where[id]  -- the server may still hold it (prelude.lua, reissue)
    if not over then counted = counted + 1 end
    expect(over or where[id] == 'issued' and field_of(id, 'server') == server,
      'server ' .. server .. ' counts group ' .. id .. ', which is ' .. (where[id] or 'unknown') ..
      ', issued to ' .. (field_of(id, 'server') or 'nobody'))
  end
end
expect(counted == #members.issued, 'servers count ' .. counted .. ' tickets, ' .. #members.issued .. ' are in flight')

for _, id in ipairs(members.ready) do
  local known = redis.call('HMGET', key('about:' .. id), 'oldest', 'newest')
  local depth = known[1] and group_depth(known[1], known[2] or known[1])
  expect(tonumber(redis.call('ZSCORE', key('by_version'), id) or nil) == depth,
    'group ' .. id .. ' is ready, but not listed by its version')
end
expect(redis.call('ZCARD', key('by_version')) == #members.ready, 'groups that are not ready are listed by version')

local assigned = {}
for _, step in ipairs(redis.call('ZRANGE', key('leases'), 0, -1)) do
  expect(redis.call('EXISTS', key('lease:' .. step)) == 1, 'step ' .. step .. ' has a lease of no groups')
  for _, id in ipairs(redis.call('ZRANGE', key('lease:' .. step), 0, -1)) do
    expect(not assigned[id], 'group ' .. id .. ' is leased for steps ' .. step .. ' and ' .. (assigned[id] or ''))
    assigned[id] = step
    expect(where[id] == 'leased' or where[id] == 'ready',
      'group ' .. id .. ' is assigned to step ' .. step .. ', but is ' .. (where[id] or 'unknown'))
  end
end
for _, id in ipairs(members.leased) do expect(assigned[id], 'group ' .. id .. ' is leased for no step') end

for _, state in ipairs({'trained', 'durable'}) do
  for _, id in ipairs(members[state]) do
    local steps = redis.call('LRANGE', key('steps:' .. id), 0, -1)
    expect(#steps == tonumber(field_of(id, 'uses') or 0) and #steps > 0,
      'group ' .. id .. ' is ' .. state .. ' after ' .. #steps .. ' recorded steps')
    for i = 2, #steps do
      expect(steps[i] ~= steps[i - 1], 'group ' .. id .. ' was used twice in step ' .. steps[i])
    end
    expect(steps[#steps] == redis.call('ZSCORE', key(state), id),
      'group ' .. id .. ' is listed as ' .. state .. ' by another step than its last')
  end
end

-- Groups that may be used again, and the rate limit's counts: the groups in the buffer and their uses.
local present, uses = 0, 0
for _, state in ipairs({'ready', 'leased'}) do
  for _, id in ipairs(members[state]) do
    local steps = redis.call('LRANGE', key('steps:' .. id), 0, -1)
    present, uses = present + 1, uses + #steps
    expect(#steps == tonumber(field_of(id, 'uses') or 0) and (steps[#steps] or false) == redis.call('ZSCORE', key('used'), id),
      'group ' .. id .. ' is ' .. state .. ' after ' .. #steps .. ' recorded steps, but listed with others as used')
  end
end
for _, id in ipairs(redis.call('ZRANGE', key('used'), 0, -1)) do
  expect(where[id] == 'ready' or where[id] == 'leased',
    'group ' .. id .. ' is to be used again, but is ' .. (where[id] or 'unknown'))
end
local limited = redis.call('HMGET', key('meta'), 'inserts', 'samples')
local inserts, samples = tonumber(limited[1] or 0), tonumber(limited[2] or 0)
expect(inserts == present and samples == uses, 'the rate limit counts ' .. inserts .. ' groups and ' .. samples ..
  ' uses, but there are ' .. present .. ' with ' .. uses)
return problems
