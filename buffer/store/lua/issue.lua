-- (task) -> issued, for as many tickets as the server's credits, the staleness capacity and the rate limit allow.
-- args: server, server_version, credits, tasks (of the env), deadline_s, max_diff, and those of `capacity`; of them
-- samples_per_insert 0: no rate limit.
-- Returns a flat list: the credits that the server has left (0 if it can get nothing), then id, epoch, position in the
-- epoch, ...
--
-- Admission (AReaL, arXiv 2505.24298, section 5.1, relative to the last publication, and counted in uses): a group issued
-- now is used first after the uses that remain to the groups before it, so at version
-- + floor((consumed + remaining) / per_version), where `consumed` counts the uses since `version` was published. It is
-- issued only if that is at most max_staleness versions ahead of the version that will generate it. The learner may have
-- lowered that bound (throttle.lua): then nothing is issued until the pipeline has drained below it. At 0 the pipeline
-- still holds the groups of one version, so training goes on.
local server = args.server
local free = args.credits - redis.call('SCARD', key('tickets_of:' .. server))
local per_insert = args.samples_per_insert

local meta = redis.call('HMGET', key('meta'), 'finished', 'epoch', 'position')
if meta[1] then return {0} end
local epoch, position = tonumber(meta[2] or 0), tonumber(meta[3] or 0)
local allowed, generating = capacity(args.server_version)
local wanted = math.min(free, allowed)
if per_insert > 0 then
  -- Reverb's SampleToInsertRatio (arXiv 2102.04736), see limiter.py.
  local inserts, samples = rate_counts()
  wanted = math.min(wanted, math.floor((args.max_diff + samples - inserts * per_insert) / per_insert + ROUNDING))
end
if wanted <= 0 then return {math.max(0, free)} end
-- A server that sweep.lua has just removed as silent: nothing would return tickets granted to it now.
if not redis.call('ZSCORE', key('heard'), server) then return {0} end

local granted, ids, groups = {free - wanted}, {}, {}
local again = redis.call('LPOP', key('reissue'), wanted) or {}
local number = redis.call('HINCRBY', key('meta'), 'next_id', wanted) - wanted
for i = 1, wanted do
  local task_epoch, task_position
  if again[i] then
    task_epoch, task_position = again[i]:match('(%d+):(%d+)')
  else
    if position >= args.tasks then epoch, position = epoch + 1, 0 end
    task_epoch, task_position = epoch, position
    position = position + 1
  end
  local id = string.format('%d', number + i)
  ids[i] = id
  groups[i] = {
    id = id, score = now() + args.deadline_s, detail = 'to ' .. server,
    facts = {'server', server, 'epoch', task_epoch, 'position', task_position, 'version', generating,
      'issued_at', timestamp()},
  }
  granted[#granted + 1] = id
  granted[#granted + 1] = tonumber(task_epoch)
  granted[#granted + 1] = tonumber(task_position)
end
call_with('SADD', key('tickets_of:' .. server), ids)
enter_state_all('issued', groups)
redis.call('HSET', key('meta'), 'epoch', epoch, 'position', position)
count('issued', wanted)
return granted
