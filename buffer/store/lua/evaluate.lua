-- Grants slices of the held-out tasks to a server that runs the version under evaluation, cut from the ranges that are
-- not granted yet.
-- args: version, tasks (held-out), share (tasks that the server may hold), slice_size (tasks per slice, at most),
-- deadline_s, server.
-- Returns {ranges left}, then id, first task, number of tasks, ...
local tasks, server, time = args.tasks, args.server, now()
local of_version, mine = slices_of(server)
if tonumber(of_version) ~= args.version then return {0} end
local version = of_version
if redis.call('HSETNX', key('eval:' .. version), 'tasks', tasks) == 1 then  -- first request
  if tasks > 0 then
    redis.call('RPUSH', key('eval_todo:' .. version), '0:' .. tasks)
  else
    redis.call('HSET', key('eval:' .. version), 'started', time)
    count_eval_tasks(version, 0, {})
  end
end
local room = args.share
for _, slice in ipairs(mine) do room = room - slice:match(':(%d+)') end
local granted = {0}
while room > 0 do
  local range = redis.call('LPOP', key('eval_todo:' .. version))
  if not range then break end
  local first, length = range:match('(%d+):(%d+)')
  local number = math.min(tonumber(length), room, args.slice_size)
  if number < tonumber(length) then
    redis.call('LPUSH', key('eval_todo:' .. version), (first + number) .. ':' .. (length - number))
  end
  room = room - number
  local slice = first .. ':' .. number
  redis.call('ZADD', key('eval_issued:' .. version), time + args.deadline_s, slice)
  redis.call('HSET', key('eval_holder:' .. version), slice, server)
  redis.call('HSET', key('eval_since:' .. version), slice, timestamp())
  redis.call('HINCRBY', key('eval_handed:' .. version), first, 1)
  redis.call('HSET', key('unsettled:' .. server), slice_ticket(version, slice), '')
  granted[#granted + 1] = slice_ticket(version, slice)
  granted[#granted + 1] = tonumber(first)
  granted[#granted + 1] = number
end
if #granted > 1 then redis.call('HSETNX', key('eval:' .. version), 'started', time) end
granted[1] = redis.call('LLEN', key('eval_todo:' .. version))
return granted
