-- (task) -> issued, for each of several servers as many tickets as requested, within its credits, the staleness capacity
-- and the rate limit. args: requests (of {server, version, credits, tickets}), tasks (of the env), skip (positions that the
-- cursor moves past, as {epoch, position}; policies/curriculum.py), deadline_s, and those of `issuable`.
-- `resumed`: only tickets whose episodes another server has begun, beyond all these limits: their tasks were admitted before,
-- and agents may wait.
-- Returns a flat list: index of the request, id, epoch, position in the epoch, number of events that are kept of its episodes
-- (keep_events.lua), ...
--
-- Admission (AReaL, arXiv 2505.24298, section 5.1, relative to the last publication, and counted in uses): a group issued
-- now is used first after the uses that remain to the groups before it, so at version
-- + floor((consumed + remaining) / per_version), where `consumed` counts the uses since `version` was published. It is
-- issued only if that is at most max_staleness versions ahead of the version that will generate it. The learner may have
-- lowered that bound (throttle.lua): then nothing is issued until the pipeline has drained below it. At 0 the pipeline
-- still holds the groups of one version, so training goes on.
local meta = redis.call('HMGET', key('meta'), 'epoch', 'position')
local epoch, position = tonumber(meta[1] or 0), tonumber(meta[2] or 0)
local granted, groups, allowed, generating, skip = {}, {}, {}, {}, {}
for _, place in ipairs(args.skip) do skip[place[1] .. ':' .. place[2]] = true end

-- Moves the cursor to the next task that is not skipped; returns its epoch and position.
local function next_task()
  while true do
    if position >= args.tasks then epoch, position = epoch + 1, 0 end
    position = position + 1
    if not skip[epoch .. ':' .. position - 1] then return epoch, position - 1 end
    count('skipped_tasks', 1)
  end
end

-- Moves the events of a reissued ticket to the new one; returns their fields of its record, and their number.
local function take_over(before, id)
  if not before or redis.call('EXISTS', key('events:' .. before)) == 0 then return {}, 0, 0 end
  local known = redis.call('HMGET', key('about:' .. before), 'event_tokens', 'event_bytes')
  redis.call('RENAME', key('events:' .. before), key('events:' .. id))
  local tokens = known[1] or 0
  return {'event_tokens', tokens, 'event_bytes', known[2] or 0}, tonumber(tokens), redis.call('HLEN', key('events:' .. id))
end

local function issue(index, server, tickets, version)
  local ids, unsettled = {}, {}
  local again = redis.call('LPOP', key(args.resumed and 'resume' or 'reissue'), tickets) or {}
  if args.resumed then tickets = #again end
  local number = redis.call('HINCRBY', key('meta'), 'next_id', tickets) - tickets
  for i = 1, tickets do
    local task_epoch, task_position, before
    if again[i] then
      task_epoch, task_position, before = again[i]:match('^(%d+):(%d+):?(.*)$')
    else
      task_epoch, task_position = next_task()
    end
    local id = string.format('%d', number + i)
    ids[i] = id
    local facts, tokens, events = take_over(before, id)
    unsettled[2 * i - 1], unsettled[2 * i] = id, '+' .. tokens
    for _, each in ipairs({'server', server, 'epoch', task_epoch, 'position', task_position, 'version', version,
      'issued_at', timestamp()}) do facts[#facts + 1] = each end
    groups[#groups + 1] = {
      id = id, score = now() + args.deadline_s, facts = facts,
      detail = 'to ' .. server .. (events > 0 and (', which goes on with ' .. before) or ''),
    }
    for _, each in ipairs({index, id, tonumber(task_epoch), tonumber(task_position), events}) do granted[#granted + 1] = each end
  end
  call_with('SADD', key('tickets_of:' .. server), ids)
  call_with('HSET', key('unsettled:' .. server), unsettled)
end

for index, request in ipairs(args.requests) do
  local server, version = request.server, request.version
  if not allowed[version] then allowed[version], generating[version] = issuable(version) end
  local free = request.credits - redis.call('SCARD', key('tickets_of:' .. server))
  local tickets = math.min(request.tickets, free, allowed[version] - #groups)
  if args.resumed then tickets = redis.call('HEXISTS', key('meta'), 'finished') == 0 and request.tickets or 0 end
  -- A server that sweep.lua has just removed as silent: nothing would return tickets granted to it now.
  if tickets > 0 and redis.call('ZSCORE', key('heard'), server) then issue(index, server, tickets, generating[version]) end
end
enter_state_all('issued', groups)
redis.call('HSET', key('meta'), 'epoch', epoch, 'position', position)
count('issued', #groups)
return granted
